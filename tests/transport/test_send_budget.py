"""All queues of a worker share one budget; each producer gets its turn."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.transport.sending.send_budget import SendBudget
from tests.transport.outbox_post import (
    PATIENCE_S,
    Item,
    Post,
    WatchedCondition,
    flat,
    outbox,
    run,
)

MIB = 1 << 20


def fill(budget, n_peers, shard_nbytes):
    """Queue shards for peers in turns, until none has room; return the bytes of each."""
    queued = dict.fromkeys(range(n_peers), 0)
    while True:
        before = budget.used_nbytes
        for peer, nbytes in queued.items():
            if budget.has_room(shard_nbytes, nbytes):
                budget.take(shard_nbytes)
                queued[peer] += shard_nbytes
        if budget.used_nbytes == before:
            return list(queued.values())


@pytest.mark.parametrize("n_peers", [1, 2, 5, 20, 60, 500])
def test_slow_peers_share_the_budget_and_leave_some(n_peers):
    limit_nbytes = 64 * MIB
    queued = fill(SendBudget(limit_nbytes), n_peers, MIB)
    assert sum(queued) <= limit_nbytes
    if n_peers <= 20:
        fair_nbytes = 2 * limit_nbytes / (1 + 2 * n_peers)
        assert all(abs(nbytes - fair_nbytes) <= MIB for nbytes in queued)
        assert limit_nbytes - sum(queued) >= fair_nbytes / 2 - MIB, "a peer to come has no room"
    else:
        assert max(queued) <= 2 * MIB


def test_shard_larger_than_the_budget_is_taken_alone():
    budget = SendBudget(10)
    assert budget.has_room(1000, 0)
    budget.take(1000)
    assert not budget.has_room(1, 0)
    with budget.changed:
        budget.give_back(1000)
    assert budget.has_room(1000, 0)


def test_first_shard_for_a_peer_needs_only_free_bytes():
    budget = SendBudget(100)
    budget.take(90)
    assert budget.has_room(10, 0)
    assert not budget.has_room(10, 20)
    assert not budget.has_room(11, 0)


def test_owner_raises_the_limit_until_it_is_forgotten():
    budget = SendBudget(10)
    budget.take(10)
    budget.want("run", 30)
    assert budget.most_nbytes == 40
    assert budget.has_room(30, 0)
    budget.forget("run")
    budget.forget("run")
    assert budget.most_nbytes == 10
    assert not budget.has_room(1, 0)


def test_raising_the_limit_wakes_producers():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = await post.hold_back("b", Item(2))
        post.outbox._budget.want("run", 10)
        await held_back
        await post.outbox.close()

    run(scenario)


def test_outboxes_share_a_budget():
    async def scenario():
        budget, changed = SendBudget(20), WatchedCondition()
        first = Post(budget=budget, changed=changed)
        second = Post(budget=budget, changed=changed)
        await first.put("a", Item(1))
        await first.put("b", Item(2))
        held_back = await second.hold_back("a", Item(3))
        assert (first.outbox.waiting_nbytes, second.outbox.waiting_nbytes) == (20, 0)
        first.open("b")
        await held_back
        assert (first.outbox.waiting_nbytes, second.outbox.waiting_nbytes) == (10, 10)
        await first.outbox.close()
        assert budget.used_nbytes == 10
        second.open("a")
        await second.outbox.flush()
        assert budget.used_nbytes == 0

    run(scenario)


def test_closing_an_outbox_unblocks_another():
    async def scenario():
        budget, changed = SendBudget(10), WatchedCondition()
        first = Post(budget=budget, changed=changed)
        second = Post(budget=budget, changed=changed)
        await first.put("a", Item(1))
        held_back = await second.hold_back("a", Item(2))
        await first.outbox.close()
        await held_back
        await second.outbox.close()
        assert budget.used_nbytes == 0

    run(scenario)


def test_silent_peers_take_no_more_than_the_budget():
    """Five hundred peers never answer, and producers stop at the budget."""
    n_peers, limit_nbytes = 500, 64 * MIB

    async def scenario():
        post = Post(limit_nbytes=limit_nbytes)
        names = [f"peer {number}" for number in range(n_peers)]

        def produce():
            for name in names:
                post.outbox.put(name, [Item(name, MIB)])

        producer = asyncio.create_task(asyncio.to_thread(produce))
        held_back = post.outbox._changed.held_back
        assert await asyncio.to_thread(held_back.acquire, timeout=PATIENCE_S)
        assert post.outbox.waiting_nbytes == limit_nbytes
        post.open(*names)
        await producer
        await post.outbox.flush()
        assert sum(len(flat(post.arrived[name])) for name in names) == n_peers

    run(scenario)


@pytest.mark.parametrize("limit_nbytes", [1, 15, 1000])
def test_all_producers_end_at_any_budget(limit_nbytes):
    async def scenario():
        post = Post(limit_nbytes=limit_nbytes)
        names = [f"peer {number}" for number in range(7)]
        post.open(*names)

        def produce(producer):
            for number, name in enumerate(names * 20):
                post.outbox.put(name, [Item((producer, number), 1 + number % 30)])

        await asyncio.gather(*(asyncio.to_thread(produce, one) for one in range(4)))
        await post.outbox.flush()
        assert sum(len(flat(post.arrived[name])) for name in names) == 4 * 7 * 20

    run(scenario)


def test_blocked_producer_does_not_hold_the_lock():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = await post.hold_back("a", Item(2))
        free = threading.Event()

        def look():
            with post.outbox._changed:
                free.set()

        await asyncio.to_thread(look)
        assert free.is_set()
        post.open("a")
        await held_back
        await post.outbox.flush()

    run(scenario)


def test_short_memory_holds_producers_back_but_one():
    is_short = True
    budget = SendBudget(100, lambda: is_short)
    assert budget.has_room(10, 0), "each producer gets its turn"
    budget.take(10)
    assert not budget.has_room(10, 0)
    is_short = False
    assert budget.has_room(10, 0)
    is_short = True
    with budget.changed:
        budget.give_back(10)
    assert budget.has_room(10, 0)


def test_producers_end_while_memory_stays_short():
    async def scenario():
        post = Post(budget=SendBudget(1000, lambda: True))
        names = [f"peer {number}" for number in range(7)]
        held_back = post.outbox._changed.held_back
        producers = [
            asyncio.create_task(post.put(name, *[Item(number) for number in range(5)]))
            for name in names
        ]
        assert await asyncio.to_thread(held_back.acquire, timeout=PATIENCE_S)
        assert post.outbox.waiting_nbytes == 10
        post.open(*names)
        await asyncio.gather(*producers)
        await post.outbox.flush()
        assert all(flat(post.arrived[name]) == list(range(5)) for name in names)

    run(scenario)


def test_a_slow_peer_does_not_keep_the_pages_of_others():
    """Each of its shards shares a page with shards that were sent."""
    pool = HostPool(0, lane_pages=1)
    most_nbytes = 16 * MIB

    class Cut:
        def __init__(self):
            self.buffer = pool.empty(64 << 10, "outgoing")
            self.nbytes = self.buffer.nbytes

    async def scenario():
        answer, sent = asyncio.Event(), threading.Semaphore(0)

        async def send(peer, shards):
            if peer == "slow":
                await answer.wait()
            else:
                sent.release(len(shards))

        changed = WatchedCondition()
        budget = SendBudget(1000 * MIB, lambda: pool.wastes_more_than(most_nbytes))
        box = outbox(send, budget=budget, changed=changed)

        def produce():
            for _ in range(20):
                for number in range(32):
                    box.put("fast" if number else "slow", [Cut()])
                    assert not number or sent.acquire(timeout=PATIENCE_S)

        producer = asyncio.create_task(asyncio.to_thread(produce))
        try:
            assert await asyncio.to_thread(changed.held_back.acquire, timeout=PATIENCE_S / 2)
            assert pool.used_nbytes <= most_nbytes + budget.used_nbytes + 2 * MIB
        finally:
            answer.set()
            await producer
        await box.close()

    run(scenario)
