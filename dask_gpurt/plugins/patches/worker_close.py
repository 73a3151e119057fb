"""A close of the worker that completes even if it is cancelled, or if the scheduler is gone.

| what | why | taken back by |
|---|---|---|
| `Worker.periodic_callbacks["heartbeat"]` | stock stops it after our part of the close, and until
then it would find that the scheduler is gone | |
| `Worker.batched_stream` | closed once the scheduler has closed its end | |
| `Worker.close`, handler `terminate`, stream handler `close` | a close cancelled half way never
sets the event that all other callers wait for, and the process lives on | `WholeClose.uninstall` |

Contract tests are in `tests/plugins/patches/test_worker_close.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from distributed.core import Server, Status

from dask_gpurt.plugins.patches.worker_memory import is_closing

if TYPE_CHECKING:
    from distributed import Worker


def stop_heartbeats(worker: Worker) -> None:
    """Send no more heartbeats, because the worker closes."""
    worker.periodic_callbacks["heartbeat"].stop()


def has_lost_scheduler(worker: Worker) -> bool:
    """Return whether the scheduler has closed its connection to a worker."""
    stream = worker.batched_stream
    return stream is None or bool(stream.closed())


class WholeClose:
    """The patch that completes a worker's close after a cancellation of the closing task.

    `dask worker --no-nanny` cancels all tasks on a signal. One of them may be closing the worker at
    that moment, on the scheduler's request. Stock's `close` stops there, and the next caller waits
    for the first one for ever.

    Parameters
    ----------
    close_rest
        Closes the rest of the runtime in that case. May be called twice.
    """

    def __init__(self, worker: Worker, close_rest: Callable[[], Awaitable[None]]) -> None:
        self._worker = worker
        self._stock = stock = worker.close

        async def close(*args: Any, **kwargs: Any) -> Any:
            is_first = not is_closing(worker)
            try:
                return await stock(*args, **kwargs)
            except asyncio.CancelledError:
                if is_first and worker.status == Status.closing:
                    await close_rest()
                    await _end(worker)
                raise

        self._close = close
        self._replace(stock, close)

    def uninstall(self) -> None:
        """Restore the stock method and handlers."""
        self._replace(self._close, self._stock)

    def _replace(self, before: Any, after: Any) -> None:
        worker = self._worker
        # Another patch may have replaced it since.
        if worker.close == before:
            worker.close = after  # type: ignore[method-assign]
        for handlers, name in ((worker.handlers, "terminate"), (worker.stream_handlers, "close")):
            if handlers.get(name) == before:
                handlers[name] = after


async def _end(worker: Worker) -> None:
    """Run the rest of `Worker.close`, for which other callers wait."""
    try:
        await Server.close(worker)
    finally:
        worker.status = Status.closed
