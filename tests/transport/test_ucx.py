"""Tests of UCX links between real processes: messages arrive, and every end is a clean one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.transport.rate import TCP_INFO_NBYTES, acked_nbytes
from dask_gpurt.transport.ucx import UcxEngine
from tests.frames.emulated_device import EmulatedMemory
from tests.transport.ucx_peer import PATIENCE_S, exchange, open_door

ROOT = pathlib.Path(__file__).parents[2]

needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"
)
#: Two configurations: UCX as the runtime uses it, which inside a host is TCP, and UCX's shared
#: memory. The runtime does not use the latter; it stands for other transports, with other protocols
#: and timing.
_SHARED_MEMORY = {"TLS": "all", "SYSV_ERROR_HANDLING": "y"}
over_both = pytest.mark.parametrize("options", [_SHARED_MEMORY, {}], ids=["shared memory", "tcp"])


class OtherProcess:
    """A handle of a `ucx_peer` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.descriptor: dict = {}
        self._replies: dict[int, asyncio.Future] = {}
        self._n_commands = 0

    @property
    def token(self) -> str:
        return self.descriptor["token"]

    async def listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            reply = json.loads(line)
            self._replies.pop(reply["id"]).set_result(reply)

    def begin(self, do: str, **more) -> asyncio.Future:
        """Start a command; return a future of the reply."""
        assert self.process.stdin is not None
        self._n_commands += 1
        future = self._replies[self._n_commands] = asyncio.get_running_loop().create_future()
        command = {"id": self._n_commands, "do": do, **more}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return future

    async def run(self, do: str, **more):
        reply = await self.begin(do, **more)
        assert "error" not in reply, reply["error"]
        return reply["result"]


@contextlib.asynccontextmanager
async def other_process(options=None):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests" / "transport" / "ucx_peer.py"),
        json.dumps(options or {}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    other = OtherProcess(process)
    try:
        assert process.stdout is not None
        other.descriptor = json.loads(await process.stdout.readline())
        listening = asyncio.create_task(other.listen())
        yield other
        assert process.stdin is not None
        if process.returncode is None:
            process.stdin.close()
            assert await process.wait() in (0, -signal.SIGKILL)
        await listening
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def engine_here(options=None):
    engine = await open_door(await UcxEngine.start("127.0.0.1", options))
    try:
        yield engine
    finally:
        await engine.close(PATIENCE_S)


@contextlib.asynccontextmanager
async def pair(options=None):
    """Start an engine here and one in another process, and link them."""
    async with other_process(options) as other, engine_here(options) as engine:
        await engine.connect(other.descriptor, PATIENCE_S)
        yield engine, other


def run(scenario):
    async def watched():
        async with asyncio.timeout(4 * PATIENCE_S):
            await scenario

    asyncio.run(watched())


async def until(condition):
    """Poll for a state of the thread that has no notification."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def both_ways(engine, other, number, sizes):
    """Exchange a message in each direction under the same number."""
    there, back, *_ = await asyncio.gather(
        other.begin("receive", peer=engine.token, number=number, sizes=sizes),
        other.begin("send", peer=engine.token, number=number, sizes=sizes),
        exchange(engine, other.token, "send", number, sizes),
        exchange(engine, other.token, "receive", number, sizes),
    )
    assert "error" not in there and "error" not in back, (there, back)


# ------------------------------------------------------------------ messages


@needs_ucxx
@pytest.mark.cluster
@over_both
def test_messages_arrive_intact(options):
    async def scenario():
        async with pair(options) as (engine, other):
            messages = [[], [0], [1], [8191], [8192], [1 << 16], [16 << 20], [3, 0, 1 << 20, 9000]]
            for number, sizes in enumerate([*messages, [100] * 3000, [20_000] * 300]):
                await both_ways(engine, other, number, sizes)
            report = engine.report()
            assert report["sent_nbytes"] == report["received_nbytes"] > 22 << 20
            assert report["peers"] == {other.token: 1}
            assert not report["problems"]

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@over_both
def test_many_messages_are_in_flight_at_once_in_any_order(options):
    async def scenario():
        async with pair(options) as (engine, other):
            numbers = range(60)
            sizes = {n: [n * 11, n * 17_000, 5] for n in numbers}
            # Send before the receiver asks, and receive in another order.
            sends = [exchange(engine, other.token, "send", n, sizes[n]) for n in numbers]
            sends = [asyncio.create_task(one) for one in sends]
            sent_back = [
                other.begin("send", peer=engine.token, number=n, sizes=sizes[n]) for n in numbers
            ]
            received = [
                other.begin("receive", peer=engine.token, number=n, sizes=sizes[n])
                for n in reversed(numbers)
            ]
            await asyncio.gather(
                *(
                    exchange(engine, other.token, "receive", n, sizes[n])
                    for n in sorted(numbers, key=lambda n: (n % 7, n))
                ),
                *sends,
            )
            for reply in await asyncio.gather(*sent_back, *received):
                assert "error" not in reply, reply

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@over_both
@pytest.mark.parametrize(
    ("sent", "announced"),
    [
        ([50_000], [50_001]),
        ([50_000], [49_999]),
        ([10], [11]),
        ([30, 10], [20, 20]),
        ([50_000, 60_000], [60_000, 50_000]),
        ([50_000, 60_000], [50_000]),
        ([10], [10, 0]),
        ([1 << 20, 1 << 20], [2 << 20]),
    ],
)
def test_a_message_of_other_lengths_is_refused_and_the_link_goes_on(options, sent, announced):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            # Margins around the announced memory show writes outside of it.
            around = [np.full(size + 4096, 7, dtype=np.uint8) for size in announced]
            buffers = [whole[2048:-2048] for whole in around]
            results = await asyncio.gather(
                there.receive(here.token, 1, buffers, PATIENCE_S),
                exchange(here, there.token, "send", 1, sent),
                return_exceptions=True,
            )
            assert isinstance(results[0], ProtocolError)
            assert results[1] is None  # the sender is done with a refused message
            for whole in around:
                assert (whole[:2048] == 7).all() and (whole[-2048:] == 7).all()
            await asyncio.gather(
                exchange(there, here.token, "receive", 2, [50_000]),
                exchange(here, there.token, "send", 2, [50_000]),
            )
            await until(lambda: not there.report()["held_nbytes"])

    run(scenario())


@needs_ucxx
@over_both
def test_a_cancelled_receive_writes_nothing(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            buffer = np.zeros(1 << 20, dtype=np.uint8)
            with pytest.raises(TransportError, match="not done within"):
                await there.receive(here.token, 1, [buffer], 0.01)
            cancelled = asyncio.create_task(there.receive(here.token, 2, [buffer], PATIENCE_S))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            for number in (1, 2):
                await exchange(here, there.token, "send", number, [1 << 20])
            assert not buffer.any()
            assert there.report()["dropped_parcels"] == 4
            assert here.report()["peers"] == {there.token: 1}

    run(scenario())


@needs_ucxx
@over_both
def test_a_retracted_message_is_freed_on_both_sides(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            buffer = np.ones(16 << 20, dtype=np.uint8)
            with pytest.raises(TransportError, match="not done within"):
                await here.send(there.token, 1, [buffer], 0.05)
            await until(lambda: there.report().get("dropped_parcels") == 3)
            await until(lambda: not here.report()["held_nbytes"])
            # The retraction may arrive later than the message, and find it dropped.
            with pytest.raises(TransportError, match="was retracted"):
                await there.receive(here.token, 1, [np.zeros_like(buffer)], PATIENCE_S)
            await asyncio.gather(
                exchange(there, here.token, "receive", 2, [50_000]),
                exchange(here, there.token, "send", 2, [50_000]),
            )

    run(scenario())


@needs_ucxx
@over_both
def test_a_message_that_was_sent_in_full_can_be_retracted(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            for number in (1, 2):
                await here.send(there.token, number, [np.ones(10, np.uint8)], PATIENCE_S)
            await until(lambda: there.report()["under_way"]["unclaimed_parcels"] == 2)
            here.retract(there.token, 1)
            await until(lambda: there.report()["under_way"]["unclaimed_parcels"] == 1)
            with pytest.raises(TransportError, match="was retracted"):
                await there.receive(here.token, 1, [np.zeros(10, np.uint8)], PATIENCE_S)
            buffer = np.zeros(10, np.uint8)
            await there.receive(here.token, 2, [buffer], PATIENCE_S)
            assert buffer.all()
            here.retract("nobody", 1)  # a peer without links
            await here.send(there.token, 4, [], PATIENCE_S)

    run(scenario())


@needs_ucxx
def test_one_number_is_received_once_at_a_time():
    async def scenario():
        async with engine_here() as here, engine_here() as there:
            await here.connect(there.descriptor, PATIENCE_S)
            first = asyncio.create_task(exchange(there, here.token, "receive", 1, [10]))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="is being received"):
                await exchange(there, here.token, "receive", 1, [10])
            await exchange(here, there.token, "send", 1, [10])
            await first

    run(scenario())


@needs_ucxx
def test_a_malformed_message_is_refused_before_ucx_sees_it():
    async def scenario():
        async with engine_here() as here:
            words = np.zeros(10, dtype=np.uint16)
            fixed = np.zeros(10, dtype=np.uint8)
            fixed.flags.writeable = False
            for buffers in ([words], [np.zeros(10, np.uint8)[::2]], [np.zeros((2, 5), np.uint8)]):
                with pytest.raises(ValueError, match="contiguous"):
                    await here.send("nobody", 1, buffers, PATIENCE_S)
            with pytest.raises(ValueError, match="read-only"):
                await here.receive("nobody", 1, [fixed], PATIENCE_S)
            with pytest.raises(ValueError, match="numbers are below"):
                await here.send("nobody", 1 << 31, [], PATIENCE_S)
            with pytest.raises(TransportError, match="no UCX link to nobody"):
                await here.send("nobody", 1, [], PATIENCE_S)
            with pytest.raises(TransportError, match="no UCX link to nobody"):
                await here.receive("nobody", 1, [], PATIENCE_S)

    run(scenario())


# --------------------------------------------------------------------- links


@needs_ucxx
@pytest.mark.cluster
def test_callers_share_a_link_and_each_side_has_its_own():
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
            # One after the other, so that the second finds an existing link.
            await here.connect(there.descriptor, PATIENCE_S)
            await there.connect(here.descriptor, PATIENCE_S)
            nbytes = 4 << 20
            of_others = carried(nbytes // 2)
            await asyncio.gather(
                exchange(here, there.token, "send", 1, [nbytes]),
                exchange(there, here.token, "receive", 1, [nbytes]),
                exchange(there, here.token, "send", 1, [nbytes]),
                exchange(here, there.token, "receive", 1, [nbytes]),
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
                    exchange(here, there.token, "send", number, [100_000]),
                    exchange(there, here.token, "receive", number, [100_000]),
                    exchange(there, here.token, "send", number, [100_000]),
                    exchange(here, there.token, "receive", number, [100_000]),
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
    """Emulated memory: it has a GPU's array interface, and allows no other access."""

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
def test_nobody_at_the_address():
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
def test_noise_on_the_port_does_no_harm():
    async def scenario():
        async with engine_here() as here, engine_here() as there:
            for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
                with socket.create_connection(("127.0.0.1", there.descriptor["port"])) as stranger:
                    with contextlib.suppress(ConnectionError):
                        stranger.sendall(noise)
            await here.connect(there.descriptor, PATIENCE_S)
            await asyncio.gather(
                exchange(here, there.token, "send", 1, [100_000]),
                exchange(there, here.token, "receive", 1, [100_000]),
            )

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
    """Run that test in its own process: memory that UCX still holds must not crash its exit."""
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
    """Also if the link of the other direction still works."""

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
            await asyncio.gather(
                exchange(here, there.token, "send", 3, [100_000]),
                exchange(there, here.token, "receive", 3, [100_000]),
            )

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
def test_beside_a_cluster_that_talks_ucxx_itself():
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


def test_without_ucxx_the_reason_is_given(without_ucxx):
    async def scenario():
        with pytest.raises(TransportError, match=r"dask-gpurt\[ucx\]"):
            await UcxEngine.start("127.0.0.1")

    run(scenario())


@needs_ucxx
def test_options_that_ucx_does_not_take_are_an_error():
    async def scenario():
        with pytest.raises(TransportError, match="UCX does not start"):
            await UcxEngine.start("127.0.0.1", {"NO_SUCH_OPTION": "1"})

    run(scenario())
