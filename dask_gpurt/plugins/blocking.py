"""Calls that block, kept away from a server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def in_a_thread(call: Callable[[], None]) -> None:
    """Run a call in a thread, or here if no thread starts any more.

    A program may end without closing the cluster in its process. Dask closes its workers then,
    after Python has shut all pools of threads.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        call()
    else:
        await running
