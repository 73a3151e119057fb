"""Messages in front of a busy peer grow, keep their order and all arrive."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from tests.transport.outbox_post import PATIENCE_S, Item, Post, flat, outbox, run, settle

# ------------------------------------------------------------------ messages


def test_shards_that_are_put_arrive():
    async def scenario():
        post = Post()
        post.open("a", "b")
        await post.put("a", Item(1), Item(2))
        await post.put("b", Item(3))
        await post.outbox.flush()
        assert flat(post.arrived["a"]) == [1, 2]
        assert flat(post.arrived["b"]) == [3]
        assert post.outbox.waiting_nbytes == 0

    run(scenario)


def test_shards_are_sent_without_a_flush():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.until_started("a", 1)
        post.open("a")
        await settle()
        assert post.arrived["a"] == [[1]]

    run(scenario)


def test_send_runs_on_the_loop():
    threads = []

    async def send(peer, items):
        threads.append(threading.get_ident())

    async def scenario():
        box = outbox(send)
        await asyncio.to_thread(box.put, "a", [Item(1)])
        await box.flush()
        assert threads == [threading.get_ident()]

    run(scenario)


def test_messages_grow_while_a_peer_is_busy():
    async def scenario():
        post = Post()
        await post.put("a", Item(0))
        await post.until_started("a", 1)
        for number in range(1, 6):
            await post.put("a", Item(number))
        await settle()
        assert post.started["a"] == [[0]]
        post.open("a")
        await post.outbox.flush()
        assert post.arrived["a"] == [[0], [1, 2, 3, 4, 5]]

    run(scenario)


def test_busy_peer_does_not_delay_another():
    async def scenario():
        post = Post()
        await post.put("a", Item(0))
        await post.until_started("a", 1)
        post.open("b")
        await post.put("b", Item(1))
        await post.until_started("b", 1)
        await settle()
        assert (post.arrived["a"], post.arrived["b"]) == ([], [[1]])
        post.open("a")
        await post.outbox.flush()

    run(scenario)


def test_message_is_closed_at_its_target_size():
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

    run(scenario)


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

    run(scenario)


def test_order_of_shards_for_a_peer_is_kept():
    """Each producer's order is kept; concurrent puts of two producers may be in either order."""

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
            assert len(flat(post.arrived[peer])) == 300
            for producer in range(3):
                mine = [name[1:] for name in flat(post.arrived[peer]) if name[0] == producer]
                assert mine == [(n, part) for n in range(rest, 100, 2) for part in (0, 1)]

    run(scenario)


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_the_number_of_messages_in_flight_to_a_peer_is_bounded(concurrency):
    async def scenario():
        post = Post(concurrency=concurrency, message_nbytes=10)
        for number in range(8):
            await post.put("a", Item(number))
            await post.put("b", Item(number))
        await post.until_started("a", concurrency)
        await post.until_started("b", concurrency)
        await settle()
        expected = [[number] for number in range(concurrency)]
        assert post.started["a"] == post.started["b"] == expected
        post.open("a", "b")
        await post.outbox.flush()
        assert dict(post.most_under_way) == {"a": concurrency, "b": concurrency}
        assert post.started["a"] == [[number] for number in range(8)]

    run(scenario)


def test_a_put_while_a_sender_ends_is_sent():
    """A shard is put after the last sender found an empty queue, and before that sender ends.

    The producer's wake-up must not count the ending sender as active. A shard whose destruction
    puts another shard creates that moment: it dies with the sender's frame.
    """

    class Last(Item):
        def __del__(self):
            box.put("a", [Item("late")])

    arrived = []

    async def send(peer, items):
        arrived.extend(item.name for item in items)

    async def scenario():
        nonlocal box
        box = outbox(send)
        box.put("a", [Last("early")])
        await settle()
        assert arrived == ["early", "late"]

    box = None
    run(scenario)


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
        box = outbox(send, message_nbytes=10)
        box.put("a", [Tracked(1), Tracked(2), Tracked(3)])
        await box.flush()
        assert alive_at_start == [[1, 2, 3], [2, 3], [3]]
        await settle()
        assert alive == set()

    run(scenario)


# ------------------------------------------------------------------ flush


def test_flush_of_an_empty_outbox_returns():
    async def scenario():
        await Post().outbox.flush()

    run(scenario)


def test_flush_waits_for_messages_in_flight_and_for_the_queue():
    async def scenario():
        post = Post(message_nbytes=10)
        await post.put("a", Item(1), Item(2))
        await post.put("b", Item(3))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("a", 1)
        post.open("b")
        await settle()
        assert not flushing.done()
        post.open("a")
        await flushing
        assert post.arrived == {"a": [[1], [2]], "b": [[3]]}
        assert post.outbox.waiting_nbytes == 0

    run(scenario)


def test_flush_does_not_depend_on_wake_ups_of_producers():
    """A flush may run before the loop gets the wake-up of the last put."""

    async def scenario():
        post = Post()
        post.open("a")
        post.outbox.put("a", [Item(1)])
        await post.outbox.flush()
        assert post.arrived["a"] == [[1]]

    run(scenario)


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

    run(scenario)


def test_an_outbox_can_be_used_again_after_a_flush():
    async def scenario():
        post = Post()
        post.open("a")
        for number in range(3):
            await post.put("a", Item(number))
            await post.outbox.flush()
        assert post.arrived["a"] == [[0], [1], [2]]

    run(scenario)


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
        await settle()
        assert (post.arrived["a"], post.arrived["b"]) == ([], [])

    run(scenario)


def test_shards_put_after_closing_are_dropped():
    async def scenario():
        post = Post()
        post.open("a")
        await post.outbox.close()
        await post.put("a", Item(1))
        await settle()
        assert post.started["a"] == []
        assert post.outbox.waiting_nbytes == 0

    run(scenario)


def test_shards_put_right_before_closing_are_dropped():
    """The producer's wake-up arrives when the queue is empty."""

    async def scenario():
        post = Post()
        post.open("a")
        post.outbox.put("a", [Item(1)])
        await post.outbox.close()
        await settle()
        assert post.started["a"] == []

    run(scenario)


def test_closing_ends_a_flush():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("a", 1)
        await post.outbox.close()
        await flushing
        assert post.arrived["a"] == []

    run(scenario)


def test_closing_is_not_a_failure():
    """Unblocked producers ask their run, which knows why it was closed."""

    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.until_started("a", 1)
        await post.outbox.close()
        await post.put("a", Item(2))
        await post.outbox.flush()

    run(scenario)


def test_closing_twice_is_allowed():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.outbox.close()
        await post.outbox.close()

    run(scenario)


def test_closing_waits_for_the_senders_to_end():
    async def scenario():
        cleaned_up = []

        async def send(peer, items):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned_up.append(peer)

        box = outbox(send)
        box.put("a", [Item(1)])
        box.put("b", [Item(2)])
        await settle()
        await box.close()
        assert sorted(cleaned_up) == ["a", "b"]

    run(scenario)


@pytest.mark.parametrize("method", ["flush", "close"])
def test_producers_may_meet_new_peers_meanwhile(method):
    async def send(peer, items):
        pass

    async def scenario():
        loop = asyncio.get_running_loop()
        box = outbox(send)
        begun, stop = threading.Event(), threading.Event()

        def produce():
            for number in range(5000):
                box.put(f"peer {number}", [Item(number)])
                if number == 200:
                    begun.set()
                if stop.is_set():
                    break

        producing = loop.run_in_executor(None, produce)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        try:
            for _ in range(200):
                await getattr(box, method)()
        finally:
            stop.set()
            await producing

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run(scenario)
    finally:
        sys.setswitchinterval(before)
