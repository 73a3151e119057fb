"""The UCX engine of a worker: started on first use, restarted after a failure, closed with its
links.

`transport.ucx` implements the engine; `plugins.shuffle.peer_links` sends over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from typing import TYPE_CHECKING, TypeVar

from dask_gpurt.errors import TransportError
from dask_gpurt.plugins.patches.p2p import requires_encryption

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.transport.ucx.engine import UcxEngine

logger = logging.getLogger("dask_gpurt.transport")

T = TypeVar("T")

_ENCRYPTED = "the cluster's connections are encrypted, and UCX's are not"


class RefusedError(TransportError):
    """One of the two workers lacks a transport; a retry would not help."""


class WorkerUcx:
    """Owner of one worker's UCX engine. On the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._starting: asyncio.Task[UcxEngine] | None = None

    async def engine(self) -> UcxEngine:
        """Return the running engine; start one if there is none.

        Raises
        ------
        RefusedError
            UCX cannot start here; the message says why.
        """
        if requires_encryption(self._worker):
            raise RefusedError(_ENCRYPTED)
        if self._starting is not None and self._starting.done():
            engine = self.started
            if engine is not None and engine.is_closing:
                logger.warning("UCX restarts on %s: %s", self._worker.address, engine.why_ended)
            if engine is None or engine.is_closing:
                self._starting = None
        if self._starting is None:
            self._starting = asyncio.create_task(_engine_of(self._worker))
        try:
            return await asyncio.shield(self._starting)
        except TransportError as error:
            raise RefusedError(str(error)) from error

    @property
    def started(self) -> UcxEngine | None:
        """The engine, or None if there is none."""
        return result_if_any(self._starting)

    def why_not(self) -> str:
        """Return why this worker cannot have an engine; empty if it can. Loads no library."""
        # Imported here: most workers never have an engine, which loads ten modules.
        from dask_gpurt.transport.ucx import engine

        if requires_encryption(self._worker):
            return _ENCRYPTED
        task = self._starting
        failed = task is not None and task.done() and not task.cancelled() and task.exception()
        return engine.why_not() or (str(failed) if failed else "")

    async def close(self, deadline_s: float) -> None:
        """Close the engine; the next call of `engine` starts another."""
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(TransportError):
                await (await starting).close(deadline_s)


def result_if_any(task: asyncio.Task[T] | None) -> T | None:
    """Return the result of a task, or None if it failed or still runs."""
    if task is None or not task.done() or task.cancelled() or task.exception():
        return None
    return task.result()


async def _engine_of(worker: Worker) -> UcxEngine:
    from dask_gpurt.transport.ucx.engine import UcxEngine

    return await UcxEngine.start(await _ip_of(worker))


async def _ip_of(worker: Worker) -> str:
    """Return the IP address at which peers reach this worker; loopback for in-process workers.

    Raises
    ------
    RefusedError
        The worker's host name has no address here.
    """
    name = worker.ip
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if worker.address.startswith("inproc://"):
            return "127.0.0.1"
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        raise RefusedError(
            f"UCX needs an IP address, and {name!r} has none at {worker.address}: {error}"
        ) from error
    addresses = [str(where[0]) for *_, where in found]
    addresses.sort(key=lambda one: ":" in one)  # IPv4 first: UCX supports nothing else
    # Many systems resolve their own host name to loopback, where no peer reaches it.
    reached = (one for one in addresses if not ipaddress.ip_address(one).is_loopback)
    return next(reached, addresses[0])
