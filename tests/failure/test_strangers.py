"""A process that knows the ports of a worker but no key is refused, and shuffles continue."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import psutil
import pytest

from dask_gpurt.errors import TransportError
from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.failure import stranger
from tests.limits import HANG_S
from tests.thoroughness import only_if_all
from tests.transport.ucx_peer import PATIENCE_S

pytest.importorskip("ucxx", reason="the ucx extra is not installed")
pytestmark = [pytest.mark.cluster]


def listening():
    connections = psutil.Process().net_connections("tcp")
    return {one.laddr for one in connections if one.status == psutil.CONN_LISTEN}


def test_ucx_listens_where_the_worker_does():
    async def scenario():
        before = listening()
        options = {"TCP_MAX_POLL": "17"}  # without those of other tests
        engine = await UcxEngine.start("127.0.0.1", options)
        made = listening() - before
        assert len(made) >= 2 and {one.ip for one in made} == {"127.0.0.1"}
        assert engine.descriptor["port"] in {one.port for one in made}
        # No peer was announced, so not even a connection is accepted.
        for one in made:
            with pytest.raises(TimeoutError), socket.socket() as caller:
                caller.settimeout(0.1)
                caller.connect(one)
        await engine.close(PATIENCE_S)

    asyncio.run(scenario())


#: A program with an inheritable pipe, an epoll and only one thread.
LOOKING_FOR_SOCKETS = """
import os, select
from dask_gpurt.transport.ucx import listening_sockets
reader, _ = os.pipe()
os.set_inheritable(reader, True)
epoll = select.epoll()
before = os.listdir("/proc/self/fd")
listening_sockets.listening()
after = os.listdir("/proc/self/fd")
assert after == before, (before, after)
"""


def test_search_for_ucx_sockets_leaves_nothing_open():
    """A copy of an epoll or of an event would keep it alive after UCX has closed it."""
    # A process of its own, because threads of other tests may open files meanwhile.
    subprocess.run([sys.executable, "-c", LOOKING_FOR_SOCKETS], check=True, timeout=HANG_S)


def closing_of_the_sockets(engine):
    """Return an event that is set once no peer is expected and every stranger is gone."""
    closed, loop, board = asyncio.Event(), asyncio.get_running_loop(), engine._board
    lose_strangers = board._lose_unverified

    def lose(reason):
        lose_strangers(reason)
        loop.call_soon_threadsafe(closed.set)

    board._lose_unverified = lose
    return closed


def test_only_an_announced_peer_may_connect():
    async def scenario():
        one, other = [await UcxEngine.start("127.0.0.1") for _ in range(2)]
        stranger = await UcxEngine.start("127.0.0.1")
        assert not other._board.invited.any_expected
        closed = closing_of_the_sockets(other)
        await one.connect(await other.invite(one.token, PATIENCE_S), PATIENCE_S)
        await asyncio.wait_for(closed.wait(), PATIENCE_S)
        assert not other._board.invited.any_expected
        with pytest.raises(TransportError):
            await stranger.connect(other.descriptor, 0.2)
        assert list(other.report()["peers"]) == [one.token]
        for engine in (one, other, stranger):
            await engine.close(PATIENCE_S)

    asyncio.run(scenario())


def test_unauthenticated_connection_is_closed():
    async def scenario():
        engine, caller = [await UcxEngine.start("127.0.0.1") for _ in range(2)]
        closed = closing_of_the_sockets(engine)
        await engine.invite("0" * 32, 0.5)
        wrong = {**engine.descriptor, "key": os.urandom(16).hex()}
        with pytest.raises(TransportError):
            await caller.connect(wrong, PATIENCE_S)
        await asyncio.wait_for(closed.wait(), PATIENCE_S)
        assert not engine._board._unverified and not engine._board.invited.any_expected
        assert not engine.report()["peers"]
        for one in (engine, caller):
            await one.close(PATIENCE_S)

    asyncio.run(scenario())


@only_if_all
@pytest.mark.slow
def test_shuffle_works_with_strangers_on_every_port():
    found = stranger.grown(stranger.KINDS, seconds=3)
    assert found["grew_mib"] << 20 <= stranger.MOST_NBYTES, found
    assert found["shuffles"] >= 2 and not found["runs"]["stock"]
    assert found["paths"] == ["ucx"]
