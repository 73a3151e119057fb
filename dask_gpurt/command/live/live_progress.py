"""The context manager of `dask_gpurt.progress`: reads the cluster while a block runs.

The cluster is read on the client's event loop, from a task of its own. Only the first and the last
reading ask workers for everything (`dask_gpurt.status`). Those between have the figures of the
dashboard's page, which workers summarise. `live_view` shows what was read; `observe` counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distributed.utils import is_kernel

import dask_gpurt
from dask_gpurt.command import run_report
from dask_gpurt.command.live.live_view import NotebookView, TerminalView
from dask_gpurt.command.observe import (
    INTERVAL_S,
    READ_TIMEOUT_S,
    ClusterRecord,
    CounterSnapshot,
    scheduler_address,
    summed,
)
from dask_gpurt.plugins import activation

if TYPE_CHECKING:
    from distributed import Client


#: Least time between two readings, as a multiple of the time that the last one took.
LEAST_REST = 4.0


def pause_s(took_s: float) -> float:
    """Return how long to wait after a reading, so that slow answers are asked for less often."""
    return max(INTERVAL_S, LEAST_REST * took_s)


class LiveProgress(activation.ClientBlock):
    """Shows what moves while a block runs, and the sum when it ends."""

    def __init__(self, client: Client) -> None:
        super().__init__(client, "dask_gpurt.progress(client)")

    def __enter__(self) -> LiveProgress:
        self._check_kind(is_async=False)
        self._open()
        try:
            self._client.sync(self._begin)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._is_running:
                self._client.sync(  # type: ignore[no-untyped-call]
                    self._end, callback_timeout=3 * READ_TIMEOUT_S
                )
        except Exception:
            # The program goes on; the note says that counts may be missing.
            pass
        finally:
            self._close(error)

    async def __aenter__(self) -> LiveProgress:
        self._check_kind(is_async=True)
        self._open()
        try:
            await self._begin()
        except BaseException as error:
            self._close(error)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._is_running:
                await self._end()
        except Exception:
            pass  # as in `__exit__`
        finally:
            self._close(error)

    @property
    def _is_running(self) -> bool:
        return self._client.status == "running"

    def _open(self) -> None:
        """Begin to show, from the thread and the context of the program: the cell of a notebook."""
        activation.scheduler_of(self._client)
        self._start_s = time.monotonic()
        self._is_complete = self._is_closed = False
        address = scheduler_address(self._client)
        self._before, self._record = ClusterRecord(address), ClusterRecord(address)
        self._snapshot = self._summed()
        self._view = (NotebookView if is_kernel() else TerminalView)(lambda: self._snapshot)
        activation.told_at_disable.add(self._absorb_last)

    async def _begin(self) -> None:
        status = await dask_gpurt.status(self._client)
        self._before.absorb(status)
        self._absorb(status)
        self._over = asyncio.Event()
        self._polling = asyncio.create_task(self._poll(), name="gpurt-progress")

    async def _poll(self) -> None:
        # A client that was closed in the block has an event loop that may go on without it.
        while not self._over.is_set() and not self._is_closed:
            began_s = time.monotonic()
            # A reading that fails is not shown; observation must never make a program fail.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(READ_TIMEOUT_S):
                    seen = await activation.overview(self._client)
                if "totals" in seen:
                    ready = [one["address"] for one in seen["workers"] if one["has_answered"]]
                    self._record.tasks_done, self._record.tasks_total = seen["tasks"]
                    self._absorb({**seen, "ready": ready})
                self._view.show(seen, time.monotonic() - self._start_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), pause_s(time.monotonic() - began_s))

    async def _end(self) -> None:
        self._over.set()
        # Not cancelled: that would break the connection to the scheduler amid an answer.
        await asyncio.wait({self._polling})
        async with asyncio.timeout(READ_TIMEOUT_S):
            self._absorb(await dask_gpurt.status(self._client))
        self._is_complete = True

    def _absorb_last(self, address: str, status: dict[str, Any]) -> None:
        if address == self._record.address:
            self._absorb(status)

    def _absorb(self, status: dict[str, Any]) -> None:
        self._record.absorb(status)
        self._snapshot = self._summed()

    def _summed(self) -> CounterSnapshot:
        return summed([(self._record, self._before)])

    def _close(self, error: BaseException | None) -> None:
        self._is_closed = True
        activation.told_at_disable.discard(self._absorb_last)
        notes = []
        if error is not None:
            notes.append(f"the block ended with {type(error).__name__}")
        if not self._is_complete:
            notes.append("the cluster did not answer at the end: the last bytes may be missing")
        wall_s = time.monotonic() - self._start_s
        report = run_report.as_dict(self._snapshot, wall_s, int(error is not None), notes)
        # Nor must a display that is gone.
        with contextlib.suppress(Exception):
            self._view.close(report)
