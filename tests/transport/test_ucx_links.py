"""UCX engines connect to the right peers, and refuse or time out on others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys

import numpy as np
import pytest

from dask_gpurt.errors import TransportError
from dask_gpurt.transport.rate import TCP_INFO_NBYTES, acked_nbytes
from tests.frames.emulated_device import EmulatedMemory
from tests.transport.ucx_peer import PATIENCE_S, exchange
from tests.transport.ucx_processes import (
    engine_here,
    needs_ucxx,
    one_way,
    other_process,
    over_both,
    run,
    until,
)

# --------------------------------------------------------------------- links


@needs_ucxx
@pytest.mark.cluster
def test_callers_share_one_link_per_direction():
    async def scenario():
        async with other_process() as other, engine_here() as engine:
            await asyncio.gather(
                *(engine.connect(other.descriptor, PATIENCE_S) for _ in range(5)),
            )
            assert engine.report()["links_made"] == 1
            for _ in range(2):
                assert await other.run("connect", descriptor=engine.descriptor) == engine.token
            assert engine.report()["links_made"] == 2
            assert (await other.run("report"))["links_made"] == 2

    run(scenario())


def carried(at_least_nbytes):
    """Return both ends of each TCP connection that has brought this many bytes to its first end."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=int(name))
        except OSError:
            continue
        with contextlib.suppress(OSError):
            if sock.family == socket.AF_INET:
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
                if acked_nbytes(info) >= at_least_nbytes:
                    found.append((sock.getpeername(), sock.getsockname()))
        sock.detach()
    return found


@needs_ucxx
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a connection carried")
def test_over_tcp_each_direction_has_a_connection_of_its_own():
    async def scenario():
        async with engine_here({"TLS": "tcp"}) as here, engine_here({"TLS": "tcp"}) as there:
            # They run one after the other, so that the second finds an existing link.
            await here.connect(there.descriptor, PATIENCE_S)
            await there.connect(here.descriptor, PATIENCE_S)
            nbytes = 4 << 20
            of_others = carried(nbytes // 2)
            await asyncio.gather(
                one_way(here, there, 1, [nbytes]), one_way(there, here, 1, [nbytes])
            )
            # The last packets may not be acknowledged yet.
            one, other = [ends for ends in carried(nbytes // 2) if ends not in of_others]
            assert set(one) != set(other)

    run(scenario())


@needs_ucxx
@over_both
def test_both_sides_may_connect_at_the_same_moment(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await asyncio.gather(
                here.connect(there.descriptor, PATIENCE_S),
                there.connect(here.descriptor, PATIENCE_S),
            )
            for number in range(5):
                await asyncio.gather(
                    one_way(here, there, number, [100_000]), one_way(there, here, number, [100_000])
                )

    run(scenario())


@needs_ucxx
def test_an_engine_can_talk_to_itself():
    async def scenario():
        async with engine_here() as engine:
            await engine.connect(engine.descriptor, PATIENCE_S)
            await asyncio.gather(
                exchange(engine, engine.token, "send", 1, [10, 100_000]),
                exchange(engine, engine.token, "receive", 1, [10, 100_000]),
            )

    run(scenario())


@needs_ucxx
def test_device_memory_is_sent_and_filled_in_place():
    """Device memory is emulated: it has a GPU's array interface, and allows no other access."""

    async def scenario():
        async with engine_here() as engine, engine_here() as other:
            await engine.connect(other.descriptor, PATIENCE_S)
            source, target, back = (EmulatedMemory(1 << 20) for _ in range(3))
            raw = np.random.default_rng(0).integers(0, 256, 1 << 20).astype(np.uint8)
            source.on_device()[:] = raw
            small, host = np.arange(10, dtype=np.uint8), np.empty(1 << 20, np.uint8)
            for number, (sent, received) in enumerate(
                [([source, small], [target, small.copy()]), ([source], [host]), ([raw], [back])]
            ):
                await asyncio.gather(
                    engine.send(other.token, number, sent, PATIENCE_S),
                    other.receive(engine.token, number, received, PATIENCE_S),
                )
            for filled in (target.on_device(), host, back.on_device()):
                np.testing.assert_array_equal(filled, raw)
            # Small buffers travel in an envelope, which is in host memory.
            with pytest.raises(ValueError, match="too few"):
                await engine.send(other.token, 9, [EmulatedMemory(8191)], PATIENCE_S)

    run(scenario())


@needs_ucxx
@over_both
def test_device_memory_needs_ucx_s_transport_for_copies(options):
    """A UCX that is built for CUDA is not enough."""

    async def scenario():
        async with engine_here(options) as engine:
            has_cuda = "cuda_copy" in engine.report()["transports"]
            assert engine.takes_device_memory == has_cuda
            engine._session.transports = ["cuda_copy", "tcp"]
            assert engine.takes_device_memory

    run(scenario())


@needs_ucxx
def test_another_engine_at_the_address_is_refused():
    async def scenario():
        async with engine_here() as here, engine_here() as there:
            someone = "0" * 32
            for wrong in ("token", "key"):
                with pytest.raises(TransportError, match="another engine answered"):
                    await here.connect({**there.descriptor, wrong: someone}, PATIENCE_S)
            assert here.report()["peers"] == {}
            await here.connect(there.descriptor, PATIENCE_S)
            await until(lambda: len(there.report()["peers"]) == 1)

    run(scenario())


@needs_ucxx
def test_address_without_an_engine_is_an_error():
    async def scenario():
        async with engine_here() as here:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                nobody = {**here.descriptor, "token": "1" * 32, "port": taken.getsockname()[1]}
                with pytest.raises(TransportError):
                    await here.connect(nobody, PATIENCE_S)
            # A server that accepts connections and stays silent.
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                silent.listen()
                nobody["port"] = silent.getsockname()[1]
                with pytest.raises(TransportError, match="not done within"):
                    await here.connect(nobody, 0.2)
            assert here.report()["peers"] == {}

    run(scenario())


@needs_ucxx
def test_noise_on_the_port_is_ignored():
    async def scenario():
        async with engine_here() as here, engine_here() as there:
            for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
                with socket.create_connection(("127.0.0.1", there.descriptor["port"])) as stranger:
                    with contextlib.suppress(ConnectionError):
                        stranger.sendall(noise)
            await here.connect(there.descriptor, PATIENCE_S)
            await one_way(here, there, 1, [100_000])

    run(scenario())


@needs_ucxx
def test_ucx_has_no_queues_in_shared_memory_unless_configured(monkeypatch):
    """A killed peer would block the queue for all others."""
    queues = {"posix", "sysv", "xpmem"}

    async def scenario():
        monkeypatch.delenv("UCX_TLS", raising=False)
        # Other users of UCX set this variable; without the queues it has no effect here.
        monkeypatch.setenv("UCX_POSIX_ERROR_HANDLING", "y")
        async with engine_here() as engine:
            transports = set(engine.report()["transports"])
            assert "tcp" in transports and not transports & queues
        monkeypatch.setenv("UCX_TLS", "posix,tcp")
        async with engine_here() as engine:
            assert set(engine.report()["transports"]) & queues == {"posix"}

    run(scenario())
