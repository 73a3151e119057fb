"""Private names of distributed that the end of a worker needs.

Contract tests are in `tests/plugins/patches/test_worker_close.py`.

| what | why | taken back by |
|---|---|---|
| `Worker.close`, handler `terminate`, stream handler `close` | a close that is cancelled half way
never sets the event that every other caller waits for, and the process lives on | `WholeClose.end`
|
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from distributed.core import Server, Status

from dask_gpurt.plugins.patches.worker_memory import is_closing

if TYPE_CHECKING:
    from distributed import Worker


class WholeClose:
    """A worker that begins to close does close, although the task that closes it is cancelled.

    `dask worker --no-nanny` cancels all tasks when it gets a signal. A worker whose scheduler told
    it to close at that moment is closed by one of them. Stock's `close` stops there, and the next
    caller waits for the first one for ever.

    Parameters
    ----------
    let_go
        Closes the rest of the runtime then. It may be called twice.
    """

    def __init__(self, worker: Worker, let_go: Callable[[], Awaitable[None]]) -> None:
        self._worker = worker
        self._stock = stock = worker.close

        async def close(*args: Any, **kwargs: Any) -> Any:
            is_first = not is_closing(worker)
            try:
                return await stock(*args, **kwargs)
            except asyncio.CancelledError:
                if is_first and worker.status == Status.closing:
                    await let_go()
                    await _end(worker)
                raise

        self._close = close
        self._replace(stock, close)

    def end(self) -> None:
        """Leave the worker as stock has it."""
        self._replace(self._close, self._stock)

    def _replace(self, before: Any, after: Any) -> None:
        worker = self._worker
        # Somebody else may have replaced it since.
        if worker.close == before:
            worker.close = after  # type: ignore[method-assign]
        for handlers, name in ((worker.handlers, "terminate"), (worker.stream_handlers, "close")):
            if handlers.get(name) == before:
                handlers[name] = after


async def _end(worker: Worker) -> None:
    """The rest of `Worker.close` that others wait for."""
    try:
        await Server.close(worker)
    finally:
        worker.status = Status.closed
