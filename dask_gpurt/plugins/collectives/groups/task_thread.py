"""The thread of a rank's task, which works for the event loop while it waits for an operation.

So large copies and sums need no further threads. They count for the task, and a device's current
stream is the task's.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class TaskThread:
    """The thread of a rank's task while it waits for an operation: it works for the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._jobs: set[asyncio.Future[Any]] = set()
        self._error: BaseException | None = None
        self._has_ended = False

    def serve(self) -> None:
        """Work until the operation ends; raise its error. In the thread."""
        while (item := self._queue.get()) is not None:
            job, answer = item
            try:
                found, error = job(), None
            except Exception as raised:  # the operation raises it
                found, error = None, raised
            self._loop.call_soon_threadsafe(_answer, answer, found, error)
        if self._error is not None:
            raise self._error

    async def run(self, job: Callable[[], T]) -> T:
        """Have the thread do something, and return its result. On the event loop.

        Raises
        ------
        asyncio.CancelledError
            The operation has ended, and the thread with it.
        """
        if self._has_ended:  # a message came in full only now
            raise asyncio.CancelledError
        answer: asyncio.Future[T] = self._loop.create_future()
        self._jobs.add(answer)
        self._queue.put((job, answer))
        try:
            return await answer
        finally:
            self._jobs.discard(answer)

    def end(self, error: BaseException | None) -> None:
        """Let the thread go; jobs that have not begun are dropped. On the event loop."""
        self._error, self._has_ended = error, True
        for answer in tuple(self._jobs):
            answer.cancel()
        self._queue.put(None)


def _answer(answer: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if not answer.done():
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)
