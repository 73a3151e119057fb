"""Small shards leave together, few peers are served at a time, and a flush is linear."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.transport.outbox_post import Item, Post, flat, run, settle

#: Longer than any test.
FOREVER_S = 1e6

# ------------------------------------------------------------------ messages that wait


def test_shard_waits_for_more_until_the_message_is_full():
    async def scenario():
        post = Post(hold_s=FOREVER_S, message_nbytes=30)
        post.open("a")
        await post.put("a", Item(1))
        await post.put("a", Item(2))
        await settle()
        assert post.started["a"] == []
        await post.put("a", Item(3))
        await post.until_started("a", 1)
        assert post.started["a"] == [[1, 2, 3]]
        await post.outbox.flush()

    run(scenario)


def test_shard_that_waited_long_enough_leaves_alone():
    async def scenario():
        post = Post(hold_s=0.001)
        post.open("a")
        await post.put("a", Item(1))
        await post.until_started("a", 1)
        await post.outbox.flush()
        assert post.arrived["a"] == [[1]]

    run(scenario)


def test_flush_sends_what_waits_and_what_comes():
    async def scenario():
        post = Post(hold_s=FOREVER_S)
        await post.put("a", Item(1))
        await settle()
        assert post.started["a"] == []
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("a", 1)
        await post.put("b", Item(2))
        await post.until_started("b", 1)
        post.open("a", "b")
        await flushing

    run(scenario)


def test_after_a_flush_shards_wait_again():
    async def scenario():
        post = Post(hold_s=FOREVER_S)
        post.open("a")
        await post.put("a", Item(1))
        await post.outbox.flush()
        await post.put("a", Item(2))
        await settle()
        assert post.started["a"] == [[1]]
        await post.outbox.close()

    run(scenario)


def test_blocked_producer_sends_all_that_waits():
    """Its own peer may have nothing; the room it needs is that of the others."""

    async def scenario():
        post = Post(hold_s=FOREVER_S, limit_nbytes=30)
        for peer in "abc":
            await post.put(peer, Item(peer))
        await settle()
        assert not any(post.started.values())
        held_back = await post.hold_back("d", Item("d"))
        for peer in "abc":
            await post.until_started(peer, 1)
        post.open("a")
        await held_back
        post.open("b", "c", "d")
        await post.outbox.flush()

    run(scenario)


def test_answer_sends_what_waits():
    """The link is idle, and what waits has waited as long as the answer took."""

    async def scenario():
        post = Post(hold_s=FOREVER_S, message_nbytes=20, concurrency=2)
        await post.put("a", Item(1), Item(2))
        await post.until_started("a", 1)
        await post.put("a", Item(3))
        await settle()
        assert post.started["a"] == [[1, 2]]
        post.open("a")
        await post.until_started("a", 2)
        assert post.started["a"] == [[1, 2], [3]]
        await post.outbox.flush()

    run(scenario)


def test_full_message_starts_beside_one_in_flight():
    async def scenario():
        post = Post(hold_s=FOREVER_S, message_nbytes=20, concurrency=2)
        await post.put("a", *map(Item, range(5)))
        await post.until_started("a", 2)
        await settle()
        assert post.started["a"] == [[0, 1], [2, 3]]
        post.open("a")
        await post.outbox.flush()

    run(scenario)


@pytest.mark.parametrize("method", ["flush", "close"])
def test_no_timer_is_left(method):
    async def scenario():
        post = Post(hold_s=FOREVER_S)
        post.open("a")
        await post.put("a", Item(1))
        await settle()
        assert post.outbox._held
        await getattr(post.outbox, method)()
        assert not post.outbox._held

    run(scenario)


def test_puts_share_a_wake_up():
    """Each wake-up writes to a socket, and costs a thread the interpreter lock."""

    async def scenario():
        post = Post()
        loop = asyncio.get_running_loop()
        wake_ups = []
        stock = loop.call_soon_threadsafe

        def counted(call, *arguments):
            wake_ups.append(call)
            return stock(call, *arguments)

        post.outbox._loop = loop
        loop.call_soon_threadsafe = counted
        for number in range(50):
            post.outbox.put(f"peer {number % 5}", [Item(number)])
        assert len(wake_ups) == 1
        del loop.call_soon_threadsafe
        post.open(*(f"peer {number}" for number in range(5)))
        await post.outbox.flush()

    run(scenario)


# ------------------------------------------------------------------ few peers at a time


def test_few_peers_have_messages_in_flight():
    async def scenario():
        post = Post(window=2)
        for peer in "abcd":
            await post.put(peer, Item(peer))
        await post.until_started("b", 1)
        await settle()
        assert sorted(name for name, sent in post.started.items() if sent) == ["a", "b"]
        post.open("b")
        await post.until_started("c", 1)
        assert post.started["d"] == []
        post.open("a", "c", "d")
        await post.outbox.flush()

    run(scenario)


def test_peers_take_turns_in_a_full_window():
    """A peer with much to send leaves the window after each message while others wait."""

    async def scenario():
        post = Post(window=1, message_nbytes=10, concurrency=2)
        await post.put("a", *map(Item, range(4)))
        await post.until_started("a", 2)
        await post.put("b", Item("b"))
        await settle()
        order = []
        send = post.outbox._send

        async def watched(peer, items):
            order.append(peer)
            await send(peer, items)

        post.outbox._send = watched
        post.open("a", "b")
        await post.outbox.flush()
        assert order == ["b", "a", "a"]
        assert flat(post.arrived["a"]) == [0, 1, 2, 3]

    run(scenario)


def test_every_peer_gets_its_turn():
    async def scenario():
        post = Post(window=3, message_nbytes=10, concurrency=2)
        names = [f"peer {number}" for number in range(20)]
        for name in names * 5:
            await post.put(name, Item(name))
        post.open(*names)
        await post.outbox.flush()
        assert all(flat(post.arrived[name]) == [name] * 5 for name in names)
        assert not post.outbox._n_active
        assert not post.outbox._line

    run(scenario)


# ------------------------------------------------------------------ linear


def n_calls_to_flush(n_peers):
    """Count the calls of functions while peers answer one after the other."""
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    async def scenario():
        post = Post(hold_s=FOREVER_S)
        names = [f"peer {number}" for number in range(n_peers)]
        for name in names:
            post.outbox.put(name, [Item(name)])
        flushing = asyncio.create_task(post.outbox.flush())
        sys.setprofile(count)
        for name in names:
            await post.until_started(name, 1)
            post.open(name)
        await flushing
        sys.setprofile(None)

    run(scenario)
    return counted


def test_flush_takes_linear_time():
    """A loop over all peers after each answer would make four times as many calls."""
    assert n_calls_to_flush(400) < 2.2 * n_calls_to_flush(200)
