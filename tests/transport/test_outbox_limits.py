"""Producers wait while too much is queued, and go on once it is sent."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from tests.transport.outbox_post import PATIENCE_S, Item, Post, Refused, flat, run

# ------------------------------------------------------------------ back-pressure


def test_a_producer_is_held_back_while_too_much_waits():
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


def test_what_is_under_way_counts_as_waiting():
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


def test_what_waits_for_one_peer_does_not_hold_back_producers_for_another():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        await post.put("b", Item(2))
        assert post.outbox.waiting_nbytes == 20
        post.open("a", "b")
        await post.outbox.flush()

    run(scenario)


def test_shards_larger_than_the_limit_are_taken_when_nothing_waits():
    async def scenario():
        post = Post(limit_nbytes=10)
        post.open("a")
        await post.put("a", Item(1, 1000), Item(2, 1000))
        await post.outbox.flush()
        assert flat(post.arrived["a"]) == [1, 2]

    run(scenario)


def test_many_producers_are_let_go_one_after_the_other():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(0))
        held_back = [await post.hold_back("a", Item(number)) for number in range(1, 4)]
        post.open("a")
        await asyncio.gather(*held_back)
        await post.outbox.flush()
        assert sorted(flat(post.arrived["a"])) == [0, 1, 2, 3]

    run(scenario)


def test_a_failure_lets_producers_go_and_tells_them():
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


def test_a_failure_does_not_keep_the_shards_that_were_being_sent():
    """Whoever logs or keeps the error has its frames, and all that these hold."""

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


def test_a_failure_of_one_peer_lets_producers_for_another_go():
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

    run(scenario)


def test_closing_lets_producers_go():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = [await post.hold_back("a", Item(number)) for number in (2, 3)]
        await post.outbox.close()
        await asyncio.gather(*held_back)
        assert post.outbox.waiting_nbytes == 0
        assert 2 not in flat(post.started["a"])

    run(scenario)


def test_closing_lets_producers_go_before_anything_was_sent():
    """There is no sender yet whose end could wake them."""

    async def scenario():
        post = Post(limit_nbytes=10)
        post.outbox.put("a", [Item(1)])
        thread = threading.Thread(target=post.outbox.put, args=("a", [Item(2)]), daemon=True)
        thread.start()
        # Without a moment for the loop: it has not heard of the first one.
        assert post.outbox._changed.held_back.acquire(timeout=PATIENCE_S)
        await post.outbox.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    run(scenario)
