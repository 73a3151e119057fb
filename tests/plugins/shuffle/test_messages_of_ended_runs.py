"""A run that is over wants no room, and a peer that has given it up does not make it fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from distributed import Reschedule

from dask_gpurt.plugins.patches.p2p import P2POutOfDiskError, ShuffleClosedError
from dask_gpurt.plugins.shuffle.messenger import Messenger
from dask_gpurt.transport.sending.send_budget import SendBudget


def messenger(runtime, **run):
    """Return a messenger with these parts of its run and its worker's runtime alone."""
    made = object.__new__(Messenger)
    vars(made).update(
        _run=SimpleNamespace(**{"id": "shuffle", "run_id": 1, "closed": False, **run}),
        _worker=SimpleNamespace(address="tcp://a"),
        _settings=SimpleNamespace(message_nbytes=1 << 20),
        _runtime=runtime,
        _n_peers=1,
        _device_message_nbytes=0,
        _retry={"count": 0, "delay_min": 0, "delay_max": 0},
    )
    return made


@pytest.mark.parametrize("is_closed", [False, True])
def test_run_that_is_over_wants_no_room_for_its_shards(is_closed):
    """It may end while a task cuts a partition in device memory."""
    budget = SendBudget(10)
    runtime = SimpleNamespace(send_budget=lambda _: budget)
    messenger(runtime, closed=is_closed).expect_device_shards()
    assert (budget.most_nbytes == 10) == is_closed


def deliver_to_peer(error, **run):
    """Deliver a message to a peer that answers with an error."""

    async def receive(address, **message):
        return {"status": "error", "exception": error, "traceback": None}

    async def deliver(address, transport, compose, call):
        return await call({})

    links = SimpleNamespace(onward=SimpleNamespace(receive=receive), connections=None)
    links.deliver = deliver
    sender = messenger(SimpleNamespace(links=links, ledger=None), **run)
    asyncio.run(sender.deliver("tcp://b", "comm", None))


def test_run_that_a_peer_is_told_to_repeat_is_over():
    with pytest.raises(ShuffleClosedError):
        deliver_to_peer(Reschedule())


def test_peer_without_a_disk_ends_the_run_at_once():
    """`retry` would take this error of the system for a lost connection."""
    errors = []
    with pytest.raises(ShuffleClosedError):
        deliver_to_peer(P2POutOfDiskError(), give_up=errors.append)
    assert [type(error) for error in errors] == [P2POutOfDiskError]
