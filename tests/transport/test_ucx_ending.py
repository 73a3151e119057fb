"""Transfers over a UCX link end with an error in time if the peer dies, hangs or closes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.transport.ucx_peer import PATIENCE_S, exchange
from tests.transport.ucx_processes import (
    ROOT,
    both_ways,
    engine_here,
    needs_ucxx,
    one_way,
    other_process,
    over_both,
    pair,
    run,
    until,
)

# -------------------------------------------------------------------- ending


@needs_ucxx
@pytest.mark.cluster
@over_both
def test_a_killed_peer_fails_waiting_transfers(options):
    async def scenario():
        async with pair(options) as (engine, other):
            await both_ways(engine, other, 1, [1 << 20])
            never_comes = np.zeros(1 << 20, dtype=np.uint8)
            waiting = [
                asyncio.create_task(coroutine)
                for coroutine in (
                    engine.receive(other.token, 2, [never_comes], PATIENCE_S),
                    exchange(engine, other.token, "send", 3, [16 << 20]),
                    exchange(engine, other.token, "send", 4, [10]),
                )
            ]
            await until(lambda: engine.report()["held_nbytes"] >= 16 << 20)
            other.process.kill()
            receive, send, _ = await asyncio.gather(*waiting, return_exceptions=True)
            assert isinstance(receive, TransportError) and isinstance(send, TransportError)
            assert "the other side is gone" in str(receive)
            with pytest.raises(TransportError, match="no UCX link"):
                await exchange(engine, other.token, "send", 5, [10])
            await until(lambda: not engine.report()["held_nbytes"])
            with pytest.raises(TransportError):
                await engine.connect(other.descriptor, PATIENCE_S)
            async with other_process(options) as another:
                await engine.connect(another.descriptor, PATIENCE_S)
                await both_ways(engine, another, 1, [1 << 20])

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@over_both
@pytest.mark.parametrize("is_back", [True, False], ids=["and comes back", "for good"])
def test_a_peer_that_hangs_blocks_no_caller_beyond_the_timeout(options, is_back):
    async def scenario():
        async with pair(options) as (engine, other):
            os.kill(other.process.pid, signal.SIGSTOP)
            buffer = np.ones(16 << 20, dtype=np.uint8)
            with pytest.raises(TransportError, match="not done within"):
                await engine.send(other.token, 1, [buffer], 0.1)
            with pytest.raises(TransportError, match="not done within"):
                await engine.receive(other.token, 1, [buffer], 0.1)
            await engine.disconnect(other.token)
            # UCX reports the memory as used until the peer answers or is gone.
            assert engine.report()["held_nbytes"] >= 16 << 20
            if is_back:
                os.kill(other.process.pid, signal.SIGCONT)
                await until(lambda: not engine.report()["held_nbytes"])
                await engine.connect(other.descriptor, PATIENCE_S)
                await both_ways(engine, other, 2, [1 << 20])
            else:
                await engine.close(PATIENCE_S)
                assert engine.report()["held_nbytes"] >= 16 << 20
                os.kill(other.process.pid, signal.SIGCONT)

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
def test_a_process_with_a_hung_peer_exits_cleanly():
    """Memory that UCX still holds must not crash the exit of a process, which runs another test."""
    test = test_a_peer_that_hangs_blocks_no_caller_beyond_the_timeout.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"{__file__}::{test}", "-k", "good and shared"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 passed" in ended.stdout
    assert ended.returncode == 0, ended.stderr


@needs_ucxx
def test_a_caller_of_a_closing_engine_is_rejected():
    async def scenario():
        may_go_on = threading.Event()
        async with engine_here() as here:
            async with engine_here() as there:
                there._session.call(lambda: may_go_on.wait(PATIENCE_S))
                with pytest.raises(TransportError, match="not done within"):
                    await here.connect(there.descriptor, 0.1)
                # It closes before it has read the greeting.
                there._session.close()
                may_go_on.set()
            await until(lambda: not here.report()["under_way"]["closing_links"])
            await until(lambda: not here.report()["held_nbytes"])

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@over_both
def test_closing_fails_transfers_in_flight(options):
    async def scenario():
        async with pair(options) as (engine, other):
            buffer = np.ones(16 << 20, dtype=np.uint8)
            theirs = other.begin("receive", peer=engine.token, number=9, sizes=[10])
            # A message that arrives and is never asked for.
            await other.run("send", peer=engine.token, number=5, sizes=[10])
            waiting = [
                asyncio.create_task(engine.send(other.token, 1, [buffer], PATIENCE_S)),
                asyncio.create_task(engine.receive(other.token, 1, [buffer], PATIENCE_S)),
            ]
            await until(lambda: engine.report()["held_nbytes"] >= 16 << 20)
            one_of_each = {"sends": 1, "receives": 1, "unclaimed_parcels": 1, "closing_links": 0}
            await until(lambda: engine.report()["under_way"] == one_of_each)
            await engine.close(PATIENCE_S)
            for result in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(result, TransportError)
            assert "TransportError" in (await theirs)["error"]
            with pytest.raises(TransportError, match="is closed"):
                await engine.send(other.token, 2, [buffer], PATIENCE_S)
            await engine.close(PATIENCE_S)
            assert engine.report()["is_closed"]
            assert engine.report()["held_nbytes"] == 0
            assert not any(engine.report()["under_way"].values())

    run(scenario())


@needs_ucxx
@over_both
def test_a_link_that_breaks_fails_the_messages_expected_on_it(options):
    """They fail even if the link of the other direction still works."""

    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            await there.connect(here.descriptor, PATIENCE_S)
            await until(lambda: here.report()["peers"] == {there.token: 2})
            # One message has arrived, and one is awaited.
            await here.send(there.token, 1, [np.ones(10, np.uint8)], PATIENCE_S)
            await until(lambda: there.report()["under_way"]["unclaimed_parcels"] == 1)
            buffer = np.zeros(10, dtype=np.uint8)
            waiting = asyncio.create_task(there.receive(here.token, 2, [buffer], PATIENCE_S))
            await until(lambda: there.report()["under_way"]["receives"] == 1)
            board = here._board
            (own,) = (link for link in board._peers[there.token].links if link.is_ours)
            here._session.call(lambda: board._lose(own, "broken"))
            with pytest.raises(TransportError, match="UCX link to"):
                await waiting
            assert there.report()["peers"] == {here.token: 1}
            with pytest.raises(TransportError, match="retracted"):
                await there.receive(here.token, 1, [buffer], PATIENCE_S)
            await one_way(here, there, 3, [100_000])

    run(scenario())


@needs_ucxx
def test_a_malformed_token_is_refused():
    async def scenario():
        async with engine_here() as engine:
            for token in ({}, [], None, 7):
                with pytest.raises(ProtocolError, match="a message of"):
                    await engine.receive(token, 1, [], PATIENCE_S)
            with pytest.raises(TransportError, match="no UCX link"):
                await engine.receive("somebody", 1, [], PATIENCE_S)
            assert not engine.is_closing

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
def test_a_closed_link_can_be_made_again():
    async def scenario():
        async with pair() as (engine, other):
            await engine.disconnect(other.token)
            assert engine.report()["peers"] == {}
            await engine.connect(other.descriptor, PATIENCE_S)
            await both_ways(engine, other, 1, [1 << 20])
            assert engine.report()["links_made"] == 2

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@pytest.mark.slow
def test_engine_works_beside_a_ucxx_cluster():
    pytest.importorskip("distributed_ucxx")
    from distributed import Client, LocalCluster

    async def scenario():
        async with other_process() as other, engine_here() as engine:
            await engine.connect(other.descriptor, PATIENCE_S)
            async with (
                LocalCluster(
                    n_workers=2,
                    threads_per_worker=1,
                    processes=False,
                    protocol="ucxx://",
                    dashboard_address=":0",
                    asynchronous=True,
                ) as cluster,
                Client(cluster, asynchronous=True) as client,
            ):
                assert cluster.scheduler_address.startswith("ucxx://")
                _, total = await asyncio.gather(
                    both_ways(engine, other, 1, [16 << 20]),
                    client.submit(sum, client.map(np.ones, [1000] * 4)),
                )
                assert total.sum() == 4000
                async with engine_here() as late:
                    await late.connect(engine.descriptor, PATIENCE_S)
                    await asyncio.gather(
                        exchange(late, engine.token, "send", 1, [1 << 20]),
                        exchange(engine, late.token, "receive", 1, [1 << 20]),
                    )
                # Only this engine is lost; the others and the cluster continue.
                assert await client.submit(sum, [1, 2]) == 3
                await both_ways(engine, other, 2, [1 << 20])
            await both_ways(engine, other, 3, [1 << 20])

    run(scenario())


def test_missing_ucxx_is_explained(without_ucxx):
    async def scenario():
        with pytest.raises(TransportError, match=r"dask-gpurt\[ucx\]"):
            await UcxEngine.start("127.0.0.1")

    run(scenario())


@needs_ucxx
def test_invalid_ucx_options_are_an_error():
    async def scenario():
        with pytest.raises(TransportError, match="UCX does not start"):
            await UcxEngine.start("127.0.0.1", {"NO_SUCH_OPTION": "1"})

    run(scenario())
