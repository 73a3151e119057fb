"""Tests of send queues: messages grow while a peer is busy, producers block, no shard is lost."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass

import pytest

from dask_gpurt.errors import ExchangeError
from dask_gpurt.transport.outbox import Outbox

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Item:
    name: object
    nbytes: int = 10


class Refused(Exception):
    """The error of sending to an unreachable peer."""


class WatchedCondition(threading.Condition):
    """A condition that signals when a producer begins to wait."""

    def __init__(self):
        super().__init__()
        self.held_back = threading.Semaphore(0)

    def wait(self, timeout=None):
        self.held_back.release()
        return super().wait(timeout)


def always(nbytes):
    """Return a function with one message size for all peers."""
    return lambda peer: nbytes


class Post:
    """An outbox on the running loop, with peers whose gates the test opens and closes."""

    def __init__(self, **options):
        options = {"limit_nbytes": 1 << 20, "message_nbytes": 1 << 20, "concurrency": 1} | options
        if not callable(size := options["message_nbytes"]):
            options["message_nbytes"] = always(size)
        self.outbox = Outbox(self._send, asyncio.get_running_loop(), **options)
        self.outbox._changed = WatchedCondition()  # the only place where a wait is visible
        self.gates = defaultdict(asyncio.Event)
        self.refusals = {}
        self.started = defaultdict(list)
        self.arrived = defaultdict(list)
        self.n_under_way = defaultdict(int)
        self.most_under_way = defaultdict(int)
        self._news = asyncio.Condition()

    async def _send(self, peer, items):
        names = [item.name for item in items]
        self.n_under_way[peer] += 1
        self.most_under_way[peer] = max(self.most_under_way[peer], self.n_under_way[peer])
        self.started[peer].append(names)
        await self._tell()
        try:
            await self.gates[peer].wait()
            if peer in self.refusals:
                raise self.refusals[peer]
            self.arrived[peer].append(names)
        finally:
            self.n_under_way[peer] -= 1

    async def _tell(self):
        async with self._news:
            self._news.notify_all()

    async def until_started(self, peer, n_messages):
        async with self._news:
            await self._news.wait_for(lambda: len(self.started[peer]) >= n_messages)

    async def put(self, peer, *items):
        """Put from a thread, as producers do."""
        await asyncio.to_thread(self.outbox.put, peer, items)

    async def hold_back(self, peer, *items):
        """Start a producer; return once it waits."""
        task = asyncio.create_task(self.put(peer, *items))
        held_back = self.outbox._changed.held_back
        assert await asyncio.to_thread(held_back.acquire, timeout=PATIENCE_S)
        assert not task.done()
        return task

    def open(self, *peers):
        for peer in peers:
            self.gates[peer].set()


def _run(scenario):
    """Run a scenario on a loop of its own, and check that it leaves no task there."""

    async def watched():
        async with asyncio.timeout(PATIENCE_S):
            await scenario()
        await _settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watched())


async def _settle():
    """Run the loop until all that can run without new events has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def _flat(messages):
    return [name for names in messages for name in names]


# ------------------------------------------------------------------ messages


def test_shards_that_are_put_arrive():
    async def scenario():
        post = Post()
        post.open("a", "b")
        await post.put("a", Item(1), Item(2))
        await post.put("b", Item(3))
        await post.outbox.flush()
        assert _flat(post.arrived["a"]) == [1, 2]
        assert _flat(post.arrived["b"]) == [3]
        assert post.outbox.waiting_nbytes == 0

    _run(scenario)


def test_shards_are_sent_without_a_flush():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.until_started("a", 1)
        post.open("a")
        await _settle()
        assert post.arrived["a"] == [[1]]

    _run(scenario)


def test_send_runs_on_the_loop():
    threads = []

    async def send(peer, items):
        threads.append(threading.get_ident())

    async def scenario():
        outbox = Outbox(
            send, asyncio.get_running_loop(), limit_nbytes=100, message_nbytes=always(100)
        )
        await asyncio.to_thread(outbox.put, "a", [Item(1)])
        await outbox.flush()
        assert threads == [threading.get_ident()]

    _run(scenario)


def test_messages_grow_while_a_peer_is_busy():
    async def scenario():
        post = Post()
        await post.put("a", Item(0))
        await post.until_started("a", 1)
        for number in range(1, 6):
            await post.put("a", Item(number))
        await _settle()
        assert post.started["a"] == [[0]]
        post.open("a")
        await post.outbox.flush()
        assert post.arrived["a"] == [[0], [1, 2, 3, 4, 5]]

    _run(scenario)


def test_a_busy_peer_does_not_hold_up_another():
    async def scenario():
        post = Post()
        await post.put("a", Item(0))
        await post.until_started("a", 1)
        post.open("b")
        await post.put("b", Item(1))
        await post.until_started("b", 1)
        await _settle()
        assert (post.arrived["a"], post.arrived["b"]) == ([], [[1]])
        post.open("a")
        await post.outbox.flush()

    _run(scenario)


def test_a_message_is_closed_once_it_reaches_its_size():
    async def scenario():
        post = Post(message_nbytes=30)
        await post.put("a", Item(0, 1))
        await post.until_started("a", 1)
        sizes = [10, 10, 10, 29, 1, 5, 1000, 2]
        await post.put("a", *(Item(f"{number}: {n}", n) for number, n in enumerate(sizes)))
        post.open("a")
        await post.outbox.flush()
        assert post.arrived["a"][1:] == [
            ["0: 10", "1: 10", "2: 10"],
            ["3: 29", "4: 1"],
            ["5: 5", "6: 1000"],
            ["7: 2"],
        ]

    _run(scenario)


def test_each_peer_has_a_size_of_its_own():
    async def scenario():
        post = Post(message_nbytes={"near": 1000, "far": 20}.__getitem__)
        for peer in ("near", "far"):
            await post.put(peer, Item(0, 1))
            await post.until_started(peer, 1)
            await post.put(peer, *(Item(number, 10) for number in range(1, 5)))
        post.open("near", "far")
        await post.outbox.flush()
        assert post.arrived["near"] == [[0], [1, 2, 3, 4]]
        assert post.arrived["far"] == [[0], [1, 2], [3, 4]]

    _run(scenario)


def test_the_order_for_a_peer_is_kept():
    """The order of each producer; concurrent puts of two producers may be in either order."""

    async def scenario():
        post = Post(limit_nbytes=200, message_nbytes=50)
        post.open("a", "b")

        def produce(producer):
            for number in range(100):
                peer = "ab"[number % 2]
                post.outbox.put(peer, [Item((producer, number, 0)), Item((producer, number, 1))])

        await asyncio.gather(*(asyncio.to_thread(produce, producer) for producer in range(3)))
        await post.outbox.flush()
        for rest, peer in enumerate("ab"):
            assert len(_flat(post.arrived[peer])) == 300
            for producer in range(3):
                mine = [name[1:] for name in _flat(post.arrived[peer]) if name[0] == producer]
                assert mine == [(n, part) for n in range(rest, 100, 2) for part in (0, 1)]

    _run(scenario)


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_the_number_of_messages_in_flight_to_a_peer_is_bounded(concurrency):
    async def scenario():
        post = Post(concurrency=concurrency, message_nbytes=10)
        for number in range(8):
            await post.put("a", Item(number))
            await post.put("b", Item(number))
        await post.until_started("a", concurrency)
        await post.until_started("b", concurrency)
        await _settle()
        expected = [[number] for number in range(concurrency)]
        assert post.started["a"] == post.started["b"] == expected
        post.open("a", "b")
        await post.outbox.flush()
        assert dict(post.most_under_way) == {"a": concurrency, "b": concurrency}
        assert post.started["a"] == [[number] for number in range(8)]

    _run(scenario)


def test_a_put_while_a_sender_ends_is_sent():
    """A shard is put after the last sender found an empty queue, and before that sender ends.

    The producer's wake-up must not count the ending sender as active. A shard whose destruction
    puts another shard creates that moment: it dies with the sender's frame.
    """

    class Last(Item):
        def __del__(self):
            outbox.put("a", [Item("late")])

    arrived = []

    async def send(peer, items):
        arrived.extend(item.name for item in items)

    async def scenario():
        nonlocal outbox
        outbox = Outbox(
            send,
            asyncio.get_running_loop(),
            limit_nbytes=100,
            message_nbytes=always(100),
            concurrency=1,
        )
        outbox.put("a", [Last("early")])
        await _settle()
        assert arrived == ["early", "late"]

    outbox = None
    _run(scenario)


def test_shards_are_freed_once_they_are_delivered():
    """The peer has them, and waiting shards need their memory."""
    alive = set()

    class Tracked(Item):
        def __init__(self, name):
            super().__init__(name)
            alive.add(name)

        def __del__(self):
            alive.discard(self.name)

    alive_at_start = []

    async def send(peer, items):
        alive_at_start.append(sorted(alive))

    async def scenario():
        outbox = Outbox(
            send,
            asyncio.get_running_loop(),
            limit_nbytes=100,
            message_nbytes=always(10),
            concurrency=1,
        )
        outbox.put("a", [Tracked(1), Tracked(2), Tracked(3)])
        await outbox.flush()
        assert alive_at_start == [[1, 2, 3], [2, 3], [3]]
        await _settle()
        assert alive == set()

    _run(scenario)


# ------------------------------------------------------------------ back-pressure


def test_a_producer_is_held_back_while_too_much_waits():
    async def scenario():
        post = Post(limit_nbytes=20)
        await post.put("a", Item(1))
        await post.put("a", Item(2))
        held_back = await post.hold_back("a", Item(3))
        assert post.outbox.waiting_nbytes == 20
        assert 3 not in _flat(post.started["a"])
        post.open("a")
        await held_back
        await post.outbox.flush()
        assert _flat(post.arrived["a"]) == [1, 2, 3]

    _run(scenario)


def test_bytes_in_flight_count_as_waiting():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        await post.until_started("a", 1)
        assert post.outbox.waiting_nbytes == 10
        held_back = await post.hold_back("a", Item(2))
        post.open("a")
        await held_back
        await post.outbox.flush()
        assert post.outbox.waiting_nbytes == 0

    _run(scenario)


def test_a_full_queue_of_one_peer_does_not_block_producers_for_another():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        await post.put("b", Item(2))
        assert post.outbox.waiting_nbytes == 20
        post.open("a", "b")
        await post.outbox.flush()

    _run(scenario)


def test_shards_larger_than_the_limit_are_accepted_by_an_empty_queue():
    async def scenario():
        post = Post(limit_nbytes=10)
        post.open("a")
        await post.put("a", Item(1, 1000), Item(2, 1000))
        await post.outbox.flush()
        assert _flat(post.arrived["a"]) == [1, 2]

    _run(scenario)


def test_blocked_producers_proceed_one_after_the_other():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(0))
        held_back = [await post.hold_back("a", Item(number)) for number in range(1, 4)]
        post.open("a")
        await asyncio.gather(*held_back)
        await post.outbox.flush()
        assert sorted(_flat(post.arrived["a"])) == [0, 1, 2, 3]

    _run(scenario)


def test_a_failure_is_raised_in_blocked_producers():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = await post.hold_back("a", Item(2))
        post.refusals["a"] = Refused("a is gone")
        post.open("a")
        with pytest.raises(Refused, match="a is gone"):
            await held_back
        assert post.started["a"] == [[1]]
        await post.outbox.close()

    _run(scenario)


def test_a_failure_does_not_keep_the_shards_in_flight_alive():
    """A logged or stored error keeps its frames and their variables."""

    async def scenario():
        post = Post()
        post.refusals["a"] = Refused("a is gone")
        post.open("a")
        items = [Item(1), Item(2)]
        kept = list(map(weakref.ref, items))
        post.outbox.put("a", items)
        items.clear()
        with pytest.raises(Refused) as error:
            await post.outbox.flush()
        assert error.value is post.refusals["a"]
        assert [item() for item in kept] == [None, None]
        await post.outbox.close()

    _run(scenario)


def test_a_failure_of_one_peer_unblocks_producers_for_another():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("b", Item(1))
        held_back = await post.hold_back("b", Item(2))
        post.refusals["a"] = Refused("a is gone")
        post.open("a")
        await post.put("a", Item(3))
        with pytest.raises(Refused, match="a is gone"):
            await held_back
        await post.outbox.close()

    _run(scenario)


def test_closing_unblocks_producers():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = [await post.hold_back("a", Item(number)) for number in (2, 3)]
        await post.outbox.close()
        await asyncio.gather(*held_back)
        assert post.outbox.waiting_nbytes == 0
        assert 2 not in _flat(post.started["a"])

    _run(scenario)


def test_closing_unblocks_producers_before_the_first_send():
    """There is no sender yet whose end could wake the producers."""

    async def scenario():
        post = Post(limit_nbytes=10)
        post.outbox.put("a", [Item(1)])
        thread = threading.Thread(target=post.outbox.put, args=("a", [Item(2)]), daemon=True)
        thread.start()
        # The loop gets no turn, and has not heard of the first put.
        assert post.outbox._changed.held_back.acquire(timeout=PATIENCE_S)
        await post.outbox.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    _run(scenario)


# ------------------------------------------------------------------ failure


def test_a_failure_surfaces_in_put_and_flush_from_then_on():
    async def scenario():
        post = Post()
        post.refusals["a"] = Refused("a is gone")
        post.open("a", "b")
        await post.put("a", Item(1))
        for _ in range(2):
            with pytest.raises(Refused, match="a is gone"):
                await post.outbox.flush()
        with pytest.raises(Refused, match="a is gone"):
            await post.put("b", Item(2))
        await _settle()
        assert post.started["b"] == []

    _run(scenario)


def test_a_failure_ends_a_waiting_flush():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.put("b", Item(2))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("b", 1)
        post.refusals["b"] = Refused("b is gone")
        post.open("b")
        # The other peer never answers.
        with pytest.raises(Refused, match="b is gone"):
            await flushing
        await post.outbox.close()

    _run(scenario)


def test_the_first_failure_is_raised():
    async def scenario():
        post = Post()
        post.refusals |= {"a": Refused("a is gone"), "b": Refused("b is gone")}
        await post.put("a", Item(1))
        await post.put("b", Item(2))
        await post.until_started("a", 1)
        await post.until_started("b", 1)
        post.open("b")
        await _settle()
        post.open("a")
        await _settle()
        with pytest.raises(Refused, match="b is gone"):
            await post.outbox.flush()

    _run(scenario)


def test_a_failure_stops_all_sending():
    async def scenario():
        post = Post(message_nbytes=10)
        post.refusals["b"] = Refused("b is gone")
        post.open("b")
        await post.put("a", Item(1), Item(2))
        await post.until_started("a", 1)
        await post.put("b", Item(3))
        with pytest.raises(Refused):
            await post.outbox.flush()
        post.open("a")
        await _settle()
        assert post.started["a"] == [[1]]

    _run(scenario)


def test_a_send_that_is_cancelled_is_a_failure():
    """A cancelled message was not delivered."""

    async def scenario():
        post = Post()
        post.refusals["a"] = asyncio.CancelledError("the connection was shut")
        post.open("a")
        await post.put("a", Item(1))
        with pytest.raises(ExchangeError):
            await post.outbox.flush()
        with pytest.raises(ExchangeError):
            await post.put("a", Item(2))

    _run(scenario)


def test_a_cancelled_send_unblocks_producers():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = await post.hold_back("a", Item(2))
        post.refusals["a"] = asyncio.CancelledError()
        post.open("a")
        with pytest.raises(ExchangeError):
            await held_back

    _run(scenario)


# ------------------------------------------------------------------ flush


def test_flush_without_anything_put():
    async def scenario():
        await Post().outbox.flush()

    _run(scenario)


def test_flush_waits_for_messages_in_flight_and_for_the_queue():
    async def scenario():
        post = Post(message_nbytes=10)
        await post.put("a", Item(1), Item(2))
        await post.put("b", Item(3))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("a", 1)
        post.open("b")
        await _settle()
        assert not flushing.done()
        post.open("a")
        await flushing
        assert post.arrived == {"a": [[1], [2]], "b": [[3]]}
        assert post.outbox.waiting_nbytes == 0

    _run(scenario)


def test_flush_does_not_depend_on_the_producers_wake_up():
    """A flush may run before the loop hears of the last put."""

    async def scenario():
        post = Post()
        post.open("a")
        post.outbox.put("a", [Item(1)])
        await post.outbox.flush()
        assert post.arrived["a"] == [[1]]

    _run(scenario)


def test_flush_can_be_cancelled_and_called_again():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("a", 1)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        post.open("a")
        await post.outbox.flush()
        assert post.arrived["a"] == [[1]]

    _run(scenario)


def test_an_outbox_can_be_used_again_after_a_flush():
    async def scenario():
        post = Post()
        post.open("a")
        for number in range(3):
            await post.put("a", Item(number))
            await post.outbox.flush()
        assert post.arrived["a"] == [[0], [1], [2]]

    _run(scenario)


# ------------------------------------------------------------------ close


def test_closing_cancels_sends_and_drops_the_queue():
    async def scenario():
        post = Post(concurrency=2, message_nbytes=10)
        await post.put("a", *(Item(number) for number in range(5)))
        await post.put("b", Item(9))
        await post.until_started("a", 1)
        await post.until_started("b", 1)
        await post.outbox.close()
        assert dict(post.n_under_way) == {"a": 0, "b": 0}
        assert post.outbox.waiting_nbytes == 0
        post.open("a", "b")
        await _settle()
        assert (post.arrived["a"], post.arrived["b"]) == ([], [])

    _run(scenario)


def test_shards_put_after_closing_are_dropped():
    async def scenario():
        post = Post()
        post.open("a")
        await post.outbox.close()
        await post.put("a", Item(1))
        await _settle()
        assert post.started["a"] == []
        assert post.outbox.waiting_nbytes == 0

    _run(scenario)


def test_shards_put_right_before_closing_are_dropped():
    """The producer's wake-up arrives when the queue is empty."""

    async def scenario():
        post = Post()
        post.open("a")
        post.outbox.put("a", [Item(1)])
        await post.outbox.close()
        await _settle()
        assert post.started["a"] == []

    _run(scenario)


def test_closing_ends_a_flush():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("a", 1)
        await post.outbox.close()
        await flushing
        assert post.arrived["a"] == []

    _run(scenario)


def test_closing_is_not_a_failure():
    """Unblocked producers ask their run, which knows why it was closed."""

    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.until_started("a", 1)
        await post.outbox.close()
        await post.put("a", Item(2))
        await post.outbox.flush()

    _run(scenario)


def test_closing_twice():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.outbox.close()
        await post.outbox.close()

    _run(scenario)


def test_closing_waits_for_the_senders_to_end():
    async def scenario():
        cleaned_up = []

        async def send(peer, items):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned_up.append(peer)

        outbox = Outbox(
            send, asyncio.get_running_loop(), limit_nbytes=100, message_nbytes=always(100)
        )
        outbox.put("a", [Item(1)])
        outbox.put("b", [Item(2)])
        await _settle()
        await outbox.close()
        assert sorted(cleaned_up) == ["a", "b"]

    _run(scenario)


@pytest.mark.parametrize("method", ["flush", "close"])
def test_producers_may_meet_new_peers_meanwhile(method):
    async def send(peer, items):
        pass

    async def scenario():
        loop = asyncio.get_running_loop()
        outbox = Outbox(send, loop, limit_nbytes=100, message_nbytes=always(100))
        begun, stop = threading.Event(), threading.Event()

        def produce():
            for number in range(5000):
                outbox.put(f"peer {number}", [])
                if number == 200:
                    begun.set()
                if stop.is_set():
                    break

        producing = loop.run_in_executor(None, produce)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        try:
            for _ in range(200):
                await getattr(outbox, method)()
        finally:
            stop.set()
            await producing

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        _run(scenario)
    finally:
        sys.setswitchinterval(before)
