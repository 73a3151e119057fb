"""Helpers that start UCX engines in this process and in another one."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import sys

import pytest

from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.transport.ucx_peer import PATIENCE_S, exchange, invite_anybody

ROOT = pathlib.Path(__file__).parents[2]
PEER = ROOT / "tests" / "transport" / "ucx_peer.py"

needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"
)
#: Two configurations of UCX: that of the runtime, which uses TCP within a host, and UCX's shared
#: memory. The runtime does not use the latter. It represents transports with other protocols and
#: timing.
SHARED_MEMORY = {"TLS": "all", "SYSV_ERROR_HANDLING": "y"}
over_both = pytest.mark.parametrize("options", [SHARED_MEMORY, {}], ids=["shared memory", "tcp"])


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
        for future in self._replies.values():
            if not future.done():
                future.set_result({"error": "the process has ended"})

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
async def other_process(options=None, script=PEER, environment=os.environ, arguments=()):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        json.dumps(options or {}),
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**environment, "PYTHONPATH": str(ROOT)},
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
    engine = await invite_anybody(await UcxEngine.start("127.0.0.1", options))
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


async def until_true(asked):
    """Poll another process for a state."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asked():
            pass


async def both_ways(engine, other, number, sizes):
    """Exchange a message in each direction under the same number."""
    there, back, *_ = await asyncio.gather(
        other.begin("receive", peer=engine.token, number=number, sizes=sizes),
        other.begin("send", peer=engine.token, number=number, sizes=sizes),
        exchange(engine, other.token, "send", number, sizes),
        exchange(engine, other.token, "receive", number, sizes),
    )
    assert "error" not in there and "error" not in back, (there, back)


async def one_way(source, target, number, sizes):
    """Send a message from one engine to another."""
    await asyncio.gather(
        exchange(target, source.token, "receive", number, sizes),
        exchange(source, target.token, "send", number, sizes),
    )
