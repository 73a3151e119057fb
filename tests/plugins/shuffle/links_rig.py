"""Helpers for tests of the choice of a transport: links of a worker, and a fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.shuffle.peer_links import Links
from dask_gpurt.shuffle.messages import Message
from tests.limits import HANG_S


class RunIsOver(Exception):
    pass


async def compose(path):
    return Message(b"", [])


def with_links(test, **more):
    """Run a coroutine function with the links of a worker with these attributes, on its loop."""

    async def main():
        loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        rpc = SimpleNamespace(available={}, occupied={})
        worker = {"address": "tcp://127.0.0.1:1", "loop": loop, "rpc": rpc, **more}
        links = Links(SimpleNamespace(**worker), 0)
        if links._lender is None:
            pytest.skip("no files in memory here, and so nothing is asked of a peer")
        try:
            await test(links)
        finally:
            await links.disconnect()

    asyncio.run(asyncio.wait_for(main(), HANG_S))


OPEN = SimpleNamespace(require_encryption=False)


class Engine:
    """An engine with the address that it was started with."""

    takes_device_memory = False
    is_closing = False

    def __init__(self, host):
        self.descriptor = {"host": host}

    @classmethod
    async def start(cls, host):
        return cls(host)

    async def close(self, deadline_s):
        pass

    async def invite(self, token, deadline_s):
        return self.descriptor


def resolving(monkeypatch, *addresses, error=None):
    """Replace the resolver; return the names it was asked for, and in which threads."""
    asked = []

    def getaddrinfo(name, *args, **kwargs):
        asked.append((name, threading.current_thread()))
        if error is not None:
            raise error
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("dask_gpurt.transport.ucx.engine.UcxEngine", Engine)
    return asked
