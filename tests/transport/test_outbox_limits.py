"""Producers wait while too much is queued, and go on once it is sent."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from tests.transport.outbox_post import PATIENCE_S, Item, Post, Refused, flat, run

# ------------------------------------------------------------------ back-pressure


def test_producer_waits_while_too_much_is_queued():
    async def scenario():
        post = Post(limit_nbytes=20)
        await post.put("a", Item(1))
        await post.put("a", Item(2))
        held_back = await post.hold_back("a", Item(3))
        assert post.outbox.waiting_nbytes == 20
        assert 3 not in flat(post.started["a"])
        post.open("a")
        await held_back
        await post.outbox.flush()
        assert flat(post.arrived["a"]) == [1, 2, 3]

    run(scenario)


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

    run(scenario)


def test_full_queue_of_a_peer_does_not_block_other_producers():
    async def scenario():
        post = Post(limit_nbytes=30)
        await post.put("a", Item(1), Item(2))
        held_back = await post.hold_back("a", Item(3))
        await post.put("b", Item(4))
        assert post.outbox.waiting_nbytes == 30
        post.open("a", "b")
        await held_back
        await post.outbox.flush()

    run(scenario)


def test_oversized_shards_are_accepted_by_an_empty_queue():
    async def scenario():
        post = Post(limit_nbytes=10)
        post.open("a")
        await post.put("a", Item(1, 1000), Item(2, 1000))
        await post.outbox.flush()
        assert flat(post.arrived["a"]) == [1, 2]

    run(scenario)


def test_blocked_producers_proceed_one_after_the_other():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(0))
        held_back = [await post.hold_back("a", Item(number)) for number in range(1, 4)]
        post.open("a")
        await asyncio.gather(*held_back)
        await post.outbox.flush()
        assert sorted(flat(post.arrived["a"])) == [0, 1, 2, 3]

    run(scenario)


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

    run(scenario)


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

    run(scenario)


def test_a_failure_of_one_peer_unblocks_producers_for_another():
    async def scenario():
        post = Post(limit_nbytes=30)
        await post.put("b", Item(1), Item(2))
        held_back = await post.hold_back("b", Item(4))
        post.refusals["a"] = Refused("a is gone")
        post.open("a")
        await post.put("a", Item(3))
        with pytest.raises(Refused, match="a is gone"):
            await held_back
        await post.outbox.close()

    run(scenario)


def test_closing_unblocks_producers():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = [await post.hold_back("a", Item(number)) for number in (2, 3)]
        await post.outbox.close()
        await asyncio.gather(*held_back)
        assert post.outbox.waiting_nbytes == 0
        assert 2 not in flat(post.started["a"])

    run(scenario)


def test_closing_unblocks_producers_before_the_first_send():
    """There is no sender yet whose end could wake the producers."""

    async def scenario():
        post = Post(limit_nbytes=10)
        post.outbox.put("a", [Item(1)])
        thread = threading.Thread(target=post.outbox.put, args=("a", [Item(2)]), daemon=True)
        thread.start()
        # The loop gets no turn, so it has not got the wake-up of the first put.
        assert post.outbox._changed.held_back.acquire(timeout=PATIENCE_S)
        await post.outbox.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    run(scenario)
