"""A program of another user, which tries to run code on every port of a cluster.

    python stranger.py MARKER PORT...

It prints one line for each attempt that succeeded. The code that it sends makes the file MARKER.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import urllib.request
from http.client import HTTPException
from pathlib import Path

from distributed import Client
from distributed.comm import connect
from distributed.protocol.pickle import dumps
from distributed.security import Security

NOBODY = 65534
TIMEOUT_S = 2


def become_nobody() -> None:
    """Become the user nobody if the tests run as root; otherwise, only lack the certificate."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


async def send_code(address: str, security: Security | None, marker: str) -> bool:
    """Return whether an answer came to a message with code in it."""
    args = security.get_connection_args("client") if security is not None else {}
    function = dumps(Path(marker).touch)
    for op in ("run", "run_function"):
        with contextlib.suppress(Exception):
            async with asyncio.timeout(TIMEOUT_S):
                comm = await connect(address, timeout=TIMEOUT_S, **args)
                try:
                    await comm.write({"op": op, "function": function, "wait": True, "reply": True})
                    await comm.read()
                    return True
                finally:
                    comm.abort()
    return False


def submit(address: str, security: Security | None, marker: str) -> bool:
    """Return whether a client can connect."""
    with contextlib.suppress(Exception):
        with Client(address, security=security, timeout=TIMEOUT_S, set_as_default=False) as client:
            client.submit(Path(marker).touch).result(TIMEOUT_S)
            return True
    return False


def page(port: str, path: str) -> bool:
    """Return whether there is a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=TIMEOUT_S):
            return True
    except (OSError, ValueError, HTTPException):
        return False


#: Pages of the HTTP server. The sitemap is not among them: it always exists, and is empty.
PAGES = ("/metrics", "/health", "/info/main/workers.html", "/json/counts.json", "/info/logs.html")


async def try_all(ports: list[str], kinds: dict[str, Security | None], marker: str) -> list[str]:
    """Try all attacks on every port at the same time; return those that succeeded."""
    tries = {
        f"{kind}://127.0.0.1:{port}": send_code(f"{kind}://127.0.0.1:{port}", security, marker)
        for port in ports
        for kind, security in kinds.items()
    }
    pages = {
        f"{path} at port {port}": asyncio.to_thread(page, port, path)
        for port in ports
        for path in PAGES
    }
    found = await asyncio.gather(*tries.values(), *pages.values())
    return [name for name, is_let_in in zip([*tries, *pages], found, strict=True) if is_let_in]


def main() -> None:
    marker, *ports = sys.argv[1:]
    kinds = {"tcp": None, "tls": Security.temporary()}
    become_nobody()
    for name in asyncio.run(try_all(ports, kinds, marker)):
        print(f"{name} answers")
    for kind, security in kinds.items():
        address = f"{kind}://127.0.0.1:{ports[0]}"
        if submit(address, security, marker):
            print(f"{address} takes a client")


if __name__ == "__main__":
    main()
