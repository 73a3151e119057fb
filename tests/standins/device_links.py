"""Two processes with linked UCX engines, each over a CUDA stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.standins import build
from tests.transport.ucx_processes import OtherProcess, other_process, run

PEER = build.HERE / "device_peer.py"
AT_START = "device at start"
#: Buffers of a message: on the device, on the host, on the device.
SIZES = [1 << 20, 300_000, 65_536]
#: Timeout of messages that are expected to arrive.
PATIENCE_S = 60.0
_NUMBERS = itertools.count()
#: UCX without handles of memory: device memory goes through staging buffers and TCP.
STAGING = {"TLS": "^posix,sysv,xpmem,cuda_ipc"}

needs_standin = pytest.mark.skipif(
    build.why_not() is not None, reason=str(build.why_not() or "there is a stand-in")
)


@contextlib.asynccontextmanager
async def device_pair(
    options: dict | None = None, at_start: bool = True, variables: dict | None = None, **settings
) -> AsyncIterator[tuple[OtherProcess, OtherProcess]]:
    """Start two processes and link the first to the second.

    Parameters
    ----------
    options
        Of UCX.
    at_start
        Whether the processes use their device before UCX starts.
    variables
        Of the environment.
    settings
        Of the stand-in.
    """
    environment = build.environment(**settings) | (variables or {})
    arguments = [AT_START] if at_start else []
    process = (options, PEER, environment, arguments)
    async with other_process(*process) as sender, other_process(*process) as receiver:
        await sender.run("connect", descriptor=receiver.descriptor)
        yield sender, receiver


class SharedPair:
    """A pair for several tests, with the loop that it lives on."""

    def __init__(self, runner: asyncio.Runner, ends: tuple[OtherProcess, OtherProcess]) -> None:
        self.runner = runner
        self.ends = ends


@contextlib.contextmanager
def shared_pair(options: dict) -> Iterator[SharedPair]:
    """Keep a pair of processes for several tests."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        yield SharedPair(runner, runner.run(stack.enter_async_context(device_pair(options))))
        runner.run(stack.aclose())


def scenario(function):
    """Run an asynchronous test: on the loop of its shared pair, if it has one."""

    def test(**fixtures):
        shared = fixtures.get("shared")
        (shared.runner.run if shared else run)(function(**fixtures))

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    test.__signature__ = inspect.signature(function)  # pytest reads the parameters from it
    return test


def begin(process, what: str, peer, number: int, wait_s=PATIENCE_S):
    """Start to send or receive a message; buffers are on the device if `what` says so."""
    more = {"peer": peer.token, "number": number, "sizes": SIZES, "wait_s": wait_s}
    return process.begin(what, **more)


async def message(
    sender, receiver, wait_s=PATIENCE_S, send="send device", receive="receive device"
) -> list[str]:
    """Send a message; return the errors of both ends, empty if there are none."""
    number = next(_NUMBERS)
    replies = await asyncio.gather(
        begin(sender, send, receiver, number, wait_s),
        begin(receiver, receive, sender, number, wait_s),
    )
    return [reply.get("error", "") for reply in replies]


async def put(name: str, value: int, *processes: OtherProcess) -> None:
    """Change a setting of the stand-in in these processes."""
    for process in processes:
        await process.run("put", name=name, value=value)


async def get(process: OtherProcess, *names: str) -> list[int]:
    """Return counters of the stand-in."""
    return [await process.run("get", name=name) for name in names]
