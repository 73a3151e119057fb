"""Senders get parts of their receiver's memory, so that many of them together do not fill it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass

import pytest

from dask_gpurt.errors import ProtocolError
from dask_gpurt.shuffle import credits
from dask_gpurt.shuffle.credits import RecentSenders
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES
from dask_gpurt.transport.sending.outbox import Outbox
from dask_gpurt.transport.sending.send_budget import SendBudget

MIB = 1 << 20
GIB = 1 << 30
MESSAGE_NBYTES = 8 * MIB


def most_nbytes(memory_nbytes, n_senders):
    """Return the most bytes that all senders may have under way to a receiver."""
    credit_nbytes = credits.part_nbytes(memory_nbytes, n_senders)
    size_nbytes, n_messages = credits.pace(MESSAGE_NBYTES, credit_nbytes)
    # A shard below the target arrives when the message is not full yet.
    return n_senders * n_messages * (size_nbytes - 1 + SHARD_TARGET_NBYTES)


@pytest.mark.parametrize("memory_nbytes", [512 * 10**6, 2 * GIB, 16 * GIB, 256 * GIB])
@pytest.mark.parametrize("n_senders", [9, 16, 33, 64, 300, 1000])
def test_messages_under_way_take_a_part_of_the_memory(memory_nbytes, n_senders):
    # Every sender may have one shard.
    least_nbytes = n_senders * SHARD_TARGET_NBYTES
    assert most_nbytes(memory_nbytes, n_senders) <= max(memory_nbytes // 8, least_nbytes)


@pytest.mark.parametrize("memory_nbytes", [512 * 10**6, 16 * GIB])
@pytest.mark.parametrize("n_senders", range(1, 9))
def test_few_senders_are_not_limited(memory_nbytes, n_senders):
    credit_nbytes = credits.part_nbytes(memory_nbytes, n_senders)
    for message_nbytes in (MESSAGE_NBYTES, 4 * MESSAGE_NBYTES):
        assert credits.pace(message_nbytes, credit_nbytes) == (message_nbytes, 2)


def test_many_peers_get_one_message_each():
    assert [credits.most_messages(n) for n in (1, 32, 33, 1000)] == [2, 2, 1, 1]


def test_sizes_fall_as_senders_come():
    found = [credits.pace(MESSAGE_NBYTES, credits.part_nbytes(16 * GIB, n)) for n in range(1, 5000)]
    sent_nbytes = [size * n_messages for size, n_messages in found]
    # One message may be larger than each of two is.
    assert all(
        later <= before + SHARD_TARGET_NBYTES for before, later in itertools.pairwise(sent_nbytes)
    )
    assert found[0] == (MESSAGE_NBYTES, 2)
    assert found[-1] == (1, 1)


@pytest.mark.parametrize("nonsense", [None, 0, -1, True, 1.5, "8 MiB", 1 << 63, [], b"1" * 5000])
def test_nonsense_is_no_credit(nonsense):
    with pytest.raises(ProtocolError, match="credit") as error:
        credits.checked(nonsense)
    assert len(str(error.value)) < 200


def test_senders_of_all_runs_share():
    senders = RecentSenders(8 * GIB)
    for number in range(20):
        senders.note(("tcp://a:1", f"run {number}"), 0.0)
    assert senders.credit_nbytes(3) == GIB // 20
    assert senders.credit_nbytes(40) == GIB // 40


def test_senders_that_ended_do_not_count():
    senders = RecentSenders(8 * GIB)
    for number in range(20):
        senders.note(number, float(number))
    assert len(senders) == 6
    senders.note("late", 1000.0)
    assert len(senders) == 1
    assert senders.credit_nbytes(1) == 8 * GIB


def test_sender_counts_once():
    senders = RecentSenders(8 * GIB)
    for second in range(100):
        senders.note("a", second / 100)
        senders.note("b", second / 100)
    assert len(senders) == 2


@pytest.mark.parametrize("n_workers", [1, 2, 5, 64])
def test_senders_begin_with_different_receivers(n_workers):
    workers = tuple(f"tcp://10.0.0.{number}:1" for number in range(n_workers))
    orders = [credits.in_turn(workers, own) for own in workers]
    for own, order in zip(workers, orders, strict=True):
        assert sorted((*order, own)) == sorted(workers)
    for turn in range(n_workers - 1):
        assert set(Counter(order[turn] for order in orders).values()) == {1}


def test_worker_without_partitions_sends_to_all():
    workers = ("tcp://a:1", "tcp://b:1", "tcp://c:1")
    assert sorted(credits.in_turn(workers, "tcp://d:1")) == list(workers)
    assert credits.in_turn((), "tcp://d:1") == ()


@dataclass(frozen=True)
class Part:
    nbytes: int


def test_incast_is_bounded():
    """Sixty-four senders meet at a receiver of 512 MB, which answers late."""
    memory_nbytes, n_senders, n_shards = 512 * 10**6, 64, 20

    async def scenario():
        held_nbytes = most = arrived = 0
        all_wait, go_on = asyncio.Event(), asyncio.Event()
        n_waiting = 0

        async def receive(peer, parts):
            nonlocal held_nbytes, most, arrived, n_waiting
            nbytes = sum(part.nbytes for part in parts)
            held_nbytes += nbytes
            most = max(most, held_nbytes)
            n_waiting += 1
            if n_waiting == n_senders:
                all_wait.set()
            await go_on.wait()
            held_nbytes -= nbytes
            arrived += nbytes

        def pace():
            return credits.pace(MESSAGE_NBYTES, credits.part_nbytes(memory_nbytes, n_senders))

        senders = [
            Outbox(
                receive,
                asyncio.get_running_loop(),
                budget=SendBudget(GIB),
                message_nbytes=lambda peer: pace()[0],
                concurrency=lambda peer: pace()[1],
            )
            for _ in range(n_senders)
        ]
        for sender in senders:
            sender.put("receiver", [Part(SHARD_TARGET_NBYTES)] * n_shards)
        flushing = asyncio.gather(*(sender.flush() for sender in senders))
        await all_wait.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        go_on.set()
        await flushing
        assert arrived == n_senders * n_shards * SHARD_TARGET_NBYTES
        assert most <= 128 * 10**6

    asyncio.run(asyncio.wait_for(scenario(), 120))
