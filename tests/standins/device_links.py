"""Two processes with linked UCX engines, each over a CUDA stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator

import pytest

from tests.standins import build
from tests.transport.ucx_processes import OtherProcess, other_process, run

PEER = build.HERE / "device_peer.py"
AT_START = "device at start"
#: Buffers of a message: on the device, on the host, on the device.
SIZES = [1 << 20, 300_000, 65_536]
#: Timeout of messages that are expected to arrive.
PATIENCE_S = 60.0
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


def begin_send(sender, receiver, number, wait_s=PATIENCE_S, sizes=SIZES):
    token = receiver.token
    return sender.begin("send device", peer=token, number=number, sizes=sizes, wait_s=wait_s)


def begin_receive(sender, receiver, number, wait_s=PATIENCE_S, sizes=SIZES):
    token = sender.token
    return receiver.begin("receive device", peer=token, number=number, sizes=sizes, wait_s=wait_s)


async def message(sender, receiver, number, wait_s=PATIENCE_S) -> list[str]:
    """Send a message from device to device; return the errors of both ends, empty if none."""
    replies = await asyncio.gather(
        begin_send(sender, receiver, number, wait_s),
        begin_receive(sender, receiver, number, wait_s),
    )
    return [reply.get("error", "") for reply in replies]


async def counters(process: OtherProcess, *names: str) -> list[int]:
    return [await process.run("get", name=name) for name in names]


def scenario(function):
    """Run an asynchronous test."""

    def test(*args, **kwargs):
        run(function(*args, **kwargs))

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    test.__signature__ = inspect.signature(function)  # pytest reads the parameters from it
    return test
