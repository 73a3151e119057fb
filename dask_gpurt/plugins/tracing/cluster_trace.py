"""The context manager of `dask_gpurt.trace`: begins a trace of a client's cluster, and writes it.

The scheduler's plugin does the rest (`trace_session`). Files of workers come in pieces at the end;
this process merges them (`tracing.merge`), so that the scheduler has no work with them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from distributed.protocol.pickle import dumps

import dask_gpurt
from dask_gpurt import config
from dask_gpurt.errors import ActivationError, TracingError
from dask_gpurt.plugins import activation
from dask_gpurt.plugins.tracing.trace_session import TraceSession
from dask_gpurt.tracing import files, merge
from dask_gpurt.tracing.clocks import ClockExchange
from dask_gpurt.tracing.events import MEMORY_LIMITS, LinkFacts, Trace
from dask_gpurt.tracing.nsight.join_traces import PIDS

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger("dask_gpurt")

Keys = Literal["prefix", "full"]
#: Longest wait for the end of a trace, which waits for workers.
_END_S = 120.0


class ClusterTrace(activation.ClientBlock):
    """Traces a cluster while a block runs, and writes the file when it ends.

    Attributes
    ----------
    trace
        The contents of the file, after the block.
    """

    def __init__(self, client: Client, path: str | os.PathLike[str], keys: Keys = "prefix") -> None:
        if keys not in ("prefix", "full"):
            raise ValueError(f"keys is {keys!r}; it may be 'prefix' or 'full'")
        super().__init__(client, "dask_gpurt.trace(client, file)")
        self._path, self._keys = Path(path), keys
        self._id = uuid4().hex
        self.trace: Trace | None = None
        self._runtime = ""

    def __enter__(self) -> ClusterTrace:
        self._check_kind(is_async=False)
        self._check()
        self._client.sync(self.begin)  # type: ignore[no-untyped-call]
        self._warn()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            collected = self._client.sync(self.collect)  # type: ignore[no-untyped-call]
            self.write(collected)
        except Exception as failed:
            self._failed(error, failed)

    async def __aenter__(self) -> ClusterTrace:
        self._check_kind(is_async=True)
        self._check()
        await self.begin()
        self._warn()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            collected = await self.collect()
            await asyncio.to_thread(self.write, collected)
        except Exception as failed:
            self._failed(error, failed)

    def _warn(self) -> None:
        if self.note:
            logger.warning("%s", self.note)

    def _failed(self, error: BaseException | None, failed: Exception) -> None:
        """Raise the error of a trace, unless the block has one of its own."""
        if error is None:
            raise failed
        logger.warning("no trace is written to %s: %s", self._path, failed)

    def _check(self) -> None:
        """Find out before the block runs that the file cannot be written."""
        activation.scheduler_of(self._client)
        files.check(self._path)

    # ------------------------------------------------------------------ on the client's loop

    async def begin(self) -> None:
        """Begin the trace.

        Raises
        ------
        ActivationError
            The scheduler has another version of this package, or none.
        TraceInProgressError
            Another trace is on.
        """
        scheduler: Any = self._client.scheduler
        if problem := await activation.scheduler_differs(self._client):
            raise ActivationError(problem)
        status = await activation.read_status(self._client, ask_workers=False)
        self._runtime = "" if status["active"] else str(status["reason"])
        plugin = TraceSession(
            self._id,
            self._client.id,
            dask_gpurt.__version__,
            config.read().trace.limit_nbytes,
            self._keys == "full",
        )
        try:
            await scheduler.register_scheduler_plugin(
                plugin=dumps(plugin), name=plugin.name, idempotent=True
            )
        except ImportError as error:
            raise ActivationError(activation.cannot_import(scheduler, error)) from error

    @property
    def note(self) -> str:
        """A sentence about events that are missing without the runtime; empty if it is on."""
        if not self._runtime:
            return ""
        return (
            f"dask_gpurt is off ({self._runtime}): the trace has tasks and samples, but no"
            " messages and no lanes"
        )

    async def collect(self, progress: Callable[[int], None] = lambda nbytes: None) -> Trace:
        """End the trace and return it.

        Parameters
        ----------
        progress
            Called with the bytes that have come so far.

        Raises
        ------
        TracingError
            The scheduler no longer has the trace.
        """
        scheduler: Any = self._client.scheduler
        # A client that closes runs preloads first, and can still ask.
        if scheduler is None or self._client.status not in ("running", "closing"):
            raise TracingError("the client was closed, or lost the scheduler: that ended its trace")
        try:
            async with asyncio.timeout(_END_S):
                found = await scheduler.gpurt_trace_stop(trace=self._id)
            data: list[bytearray] = []
            for number in range(-1, len(found["workers"])):
                data.append(bytearray())
                while part := await scheduler.gpurt_trace_part(
                    trace=self._id, number=number, offset=len(data[-1])
                ):
                    data[-1] += part
                    progress(sum(map(len, data)))
        except TimeoutError:
            raise TracingError(f"the trace has not ended in {_END_S:g} s") from None
        except OSError as error:
            raise TracingError(f"the scheduler does not answer any more: {error}") from error
        finally:
            await self._forget()
        return await asyncio.to_thread(self._merged, found, data)

    async def _forget(self) -> None:
        try:
            scheduler: Any = self._client.scheduler
            async with asyncio.timeout(_END_S):
                await scheduler.gpurt_trace_close(trace=self._id)
        except Exception as error:
            # The scheduler drops the trace with its client.
            logger.info("the scheduler has not dropped the trace: %r", error)

    def _merged(self, found: dict[str, Any], data: list[bytearray]) -> Trace:
        of_scheduler = found["scheduler"]
        scheduler = merge.RecordedProcess(
            of_scheduler["address"],
            "scheduler",
            of_scheduler["host"],
            data[0],
            n_dropped=of_scheduler["n_dropped"],
            ended=of_scheduler["ended"],
        )
        workers = [
            _recorded(one, file) for one, file in zip(found["workers"], data[1:], strict=True)
        ]
        about = {
            "versions": found["versions"],
            "keys": self._keys,
            "runtime": self._runtime or "on",
            "program": os.path.basename(sys.argv[0]),
            "gpurt": found["settings"],
            PIDS: found["pids"],
            MEMORY_LIMITS: found["memory_limits"],
        }
        return merge.merged(
            scheduler,
            workers,
            found["began_s"],
            found["ended_s"],
            found["began_utc_s"],
            links=[LinkFacts(source, target, "", rate) for source, target, rate in found["links"]],
            about=about,
        )

    def write(self, trace: Trace) -> None:
        """Write the file. Raises `OSError`."""
        self.trace = trace
        files.write(trace, self._path)


def _recorded(said: dict[str, Any], data: bytearray) -> merge.RecordedProcess:
    """Return what the scheduler says of a worker, with the file that came."""
    ended = said["ended"]
    if not ended and len(data) < said["nbytes"]:
        ended = f"lost: it closed, and only {len(data)} of {said['nbytes']} bytes came"
    return merge.RecordedProcess(
        said["address"],
        said["name"],
        said["host"],
        data,
        said["n_threads"],
        said["counters"],
        said["n_dropped"],
        ended,
        [ClockExchange(*one) for one in said["exchanges"]],
        said["joined_s"],
        said["left_s"],
    )
