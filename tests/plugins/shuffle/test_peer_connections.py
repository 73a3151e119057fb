"""Shuffle messages have connections of their own, as many as open files allow."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.plugins.shuffle import peer_connections
from dask_gpurt.plugins.shuffle.peer_connections import PeerConnections
from tests.limits import HANG_S


class Held:
    """A peer's handler for messages that does not answer before its test lets it."""

    def __init__(self, worker, n_calls):
        self.n_calls, self.n_left = 0, n_calls
        self.are_there, self.may_answer = asyncio.Event(), asyncio.Event()
        worker.handlers["shuffle_receive"] = self.shuffle_receive

    async def shuffle_receive(self, data):
        self.n_calls += 1
        self.n_left -= 1
        if not self.n_left:
            self.are_there.set()
        await self.may_answer.wait()
        return data


@pytest.fixture
def few_files(monkeypatch):
    """A limit on open files, of which this test's pools get eight connections each."""
    monkeypatch.setattr(peer_connections, "_pools", type(peer_connections._pools)())
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 1000))


def test_heartbeats_do_not_wait_behind_messages(few_files):
    @gen_cluster(nthreads=[("", 1)] * 2)
    async def test(s, a, b):
        held, connections = Held(b, 8), PeerConnections(a)
        calls = [
            asyncio.create_task(connections.receive(b.address, data=number)) for number in range(20)
        ]
        async with asyncio.timeout(HANG_S):
            await held.are_there.wait()
            pool = await connections.pool()
            assert pool.limit == 8
            assert pool.active == 8
            assert connections.is_busy
            assert not a.rpc.occupied.get(b.address)
            await a.heartbeat()
            await a.scheduler.identity()
            assert held.n_calls == 8
            held.may_answer.set()
            assert await asyncio.gather(*calls) == list(range(20))
            assert not connections.is_busy
            await connections.close(for_good=True)

    test()


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_calls_to_a_lost_worker_end(s, a, b):
    held, connections = Held(b, 1), PeerConnections(a)
    call = asyncio.create_task(connections.receive(b.address, data=1))
    async with asyncio.timeout(HANG_S):
        await held.are_there.wait()
        # Dask calls this when the scheduler says that the worker is gone.
        a.rpc.remove(b.address)
        with pytest.raises(OSError):
            await call
    held.may_answer.set()
    await connections.close(for_good=True)
    assert "remove" not in vars(a.rpc)


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_closed_connections_come_back_unless_it_was_for_good(s, a, b):
    held, connections = Held(b, 1), PeerConnections(a)
    held.may_answer.set()
    for number in range(2):
        assert await connections.receive(b.address, data=number) == number
        assert len(connections.to(b.address)) == 1
        await connections.close()
        assert connections.to(b.address) == []
    await connections.close(for_good=True)
    with pytest.raises(OSError, match="closed"):
        await connections.receive(b.address, data=3)


@gen_cluster(nthreads=[("", 1)] * 2)
async def test_idle_connections_are_closed_at_rest(s, a, b):
    held, connections = Held(b, 1), PeerConnections(a)
    connections.rest()
    held.may_answer.set()
    await connections.receive(b.address, data=1)
    connections.rest()
    assert connections.to(b.address) == []
    await connections.receive(b.address, data=2)
    await connections.close(for_good=True)


def test_workers_of_a_process_share_its_files(few_files, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1600, 2000))

    @gen_cluster(nthreads=[("", 1)] * 2)
    async def test(s, a, b):
        pools = [PeerConnections(worker) for worker in (a, b)]
        assert [(await one.pool()).limit for one in pools] == [100, 100]
        for one in pools:
            await one.close(for_good=True)

    test()


def limits_of_a_process(soft, hard):
    """Return the limits that a process with these limits has then."""
    code = (
        "import resource\n"
        "from dask_gpurt.plugins.shuffle.peer_connections import allow_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "allow_open_files()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return tuple(map(int, done.stdout.split()))


def test_soft_limit_on_open_files_is_raised():
    assert limits_of_a_process(300, 900) == (900, 900)
    assert limits_of_a_process(900, 900) == (900, 900)


@pytest.mark.parametrize("n_workers", [1, 2, 10, 33, 34, 64, 65, 66, 1000])
def test_needed_files_are_enough(n_workers):
    n_files = peer_connections.needed_files(n_workers)
    assert peer_connections.most_workers(n_files) >= n_workers
    assert n_workers == 1 or peer_connections.most_workers(n_files - 1) < n_workers
