"""Lanes of a CPU worker: threads on which communication goes on while tasks compute.

A task runs on a thread of Dask's. What brings its inputs and takes its outputs away (packing,
codecs, copies, disk) runs on lanes beside it, as it would on streams of a GPU: each lane is a few
threads of its own, and what they do releases the interpreter lock. Within a lane the more urgent
goes first; nothing that runs is stopped.

With one thread and one priority a lane is an ordered queue.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.ledger import Ledger

T = TypeVar("T")


class _Job:
    """Work that waits for its turn."""

    __slots__ = ("args", "function", "future", "nbytes", "path", "turn")

    def __init__(
        self,
        turn: tuple[int, int],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        path: str,
        nbytes: int,
    ) -> None:
        self.turn = turn
        self.function = function
        self.args = args
        self.path = path
        self.nbytes = nbytes
        self.future: Future[Any] = Future()

    def __lt__(self, other: _Job) -> bool:
        return self.turn < other.turn


class Lane:
    """A few threads, and work that waits for them.

    Parameters
    ----------
    name
        What threads and ledger call it.
    n_threads
        Most that work at a time. They are started as they are needed.
    ledger
        Where to enter what was done.
    """

    def __init__(self, name: str, n_threads: int = 1, ledger: Ledger | None = None) -> None:
        self.name = name
        self._n_threads = n_threads
        self._ledger = ledger
        self._changed = threading.Condition()
        self._jobs: list[_Job] = []
        self._n_submitted = 0
        self._threads: list[threading.Thread] = []
        self._n_idle = 0
        self._is_closed = False

    def submit(
        self,
        function: Callable[..., T],
        *args: Any,
        priority: Priority = Priority.NORMAL,
        path: str = "",
        nbytes: int = 0,
    ) -> Future[T]:
        """Have something done.

        Parameters
        ----------
        priority
            Before whom it goes: those that are less urgent, and those as urgent that came later.
        path, nbytes
            For the ledger: what it is, and how much it moves.

        Returns
        -------
        Future
            Its result; what has not begun can be cancelled by it. `asyncio.wrap_future` makes it
            something to await.

        Raises
        ------
        RuntimeError
            The lane is closed, or no thread can be started for it.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"lane {self.name!r} is closed")
            self._n_submitted += 1
            turn = (int(priority), self._n_submitted)
            job = _Job(turn, function, args, path or getattr(function, "__name__", ""), nbytes)
            heapq.heappush(self._jobs, job)
            if len(self._jobs) > self._n_idle and len(self._threads) < self._n_threads:
                number = len(self._threads)
                # Daemons: what was to be written when the process ends is of no use to anybody.
                thread = threading.Thread(
                    target=self._serve, name=f"gpurt {self.name} {number}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # the process may have no more of them
                    if not self._threads:
                        self._jobs.clear()  # there is none but this
                        raise
                else:
                    self._threads.append(thread)
            self._changed.notify()
            return job.future

    @property
    def n_waiting(self) -> int:
        """Pieces of work that have not begun."""
        with self._changed:
            return len(self._jobs)

    def is_pending(self) -> bool:
        """Whether anything waits or is being done. Asked at each launch that may be shaped."""
        # Without the lock, which whoever launches would wait for: a thread stops being idle before
        # it takes a piece of work, so that nothing is missed in between.
        return bool(self._jobs) or self._n_idle < len(self._threads)

    def close(self) -> None:
        """Cancel what has not begun and wait for what has. Does nothing the second time."""
        with self._changed:
            self._is_closed = True
            dropped, self._jobs = self._jobs, []
            threads = list(self._threads)
            self._changed.notify_all()
        # Outside of the lock: callbacks of futures run here, and may do anything.
        for job in dropped:
            if job.future.cancel():
                job.future.set_running_or_notify_cancel()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            self._do(job)
            # An idle thread must not keep the last work's arguments alive.
            del job

    def _next(self) -> _Job | None:
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return None  # closed; what has ended is as good as idle
            self._n_idle -= 1
            return heapq.heappop(self._jobs)

    def _do(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        entry: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._ledger is not None:
            entry = self._ledger.timed(self.name, job.path, job.nbytes)
        try:
            with entry:
                result = job.function(*job.args)
        except BaseException as error:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)
        finally:
            # The error's traceback holds this frame: it must not hold the error in turn.
            del job
