"""Lanes of a CPU worker: small thread pools for communication beside the running tasks.

Tasks run on Dask's threads. Packing, codecs, copies and disk I/O for their inputs and outputs run
on lanes beside them, as they would on the streams of a GPU. This work releases the interpreter
lock. Within a lane, more urgent work starts first. A lane never interrupts running work.

A lane with one thread and one priority is an ordered queue.
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
    """A queued function call."""

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
    """A few threads with a priority queue of work.

    Parameters
    ----------
    name
        Name in thread names and ledger entries.
    n_threads
        Largest number of threads. The lane starts them when it needs them.
    ledger
        Gets an entry for each piece of work.
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
        """Queue a function call.

        Parameters
        ----------
        priority
            The call runs before calls of lower priority, and before later calls of the same
            priority.
        path, nbytes
            Kind of work and bytes moved, for the ledger.

        Returns
        -------
        Future
            The result. Cancelling it drops the call if it has not started. Use
            `asyncio.wrap_future` to await it.

        Raises
        ------
        RuntimeError
            The lane is closed, or the process cannot start a thread for it.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"lane {self.name!r} is closed")
            self._n_submitted += 1
            turn = (int(priority), self._n_submitted)
            job = _Job(turn, function, args, path or getattr(function, "__name__", ""), nbytes)
            heapq.heappush(self._jobs, job)
            if len(self._jobs) > self._n_idle and len(self._threads) < self._n_threads:
                try:
                    self._start_thread()
                except RuntimeError:
                    if not self._threads:
                        self._jobs.clear()  # holds only this job
                        raise
            self._changed.notify()
            return job.future

    def start(self) -> None:
        """Start the first thread now, so that no later call fails because there is none.

        Raises
        ------
        RuntimeError
            The process cannot start a thread.
        """
        with self._changed:
            if not self._threads:
                self._start_thread()

    def _start_thread(self) -> None:
        # Daemon threads: when the process ends, unfinished writes are of no use.
        name = f"gpurt {self.name} {len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    @property
    def n_waiting(self) -> int:
        """Number of calls that have not started."""
        with self._changed:
            return len(self._jobs)

    def is_pending(self) -> bool:
        """Return whether a call is waiting or running. Every shapeable kernel launch asks this."""
        # Without the lock, so that a launch does not wait for it. A thread stops being idle before
        # it takes a job, so this misses no job in between.
        return bool(self._jobs) or self._n_idle < len(self._threads)

    def close(self) -> None:
        """Cancel calls that have not started and wait for the others. Repeated calls do nothing."""
        with self._changed:
            self._is_closed = True
            dropped, self._jobs = self._jobs, []
            threads = list(self._threads)
            self._changed.notify_all()
        # Outside the lock: callbacks of the futures run here, and they may do anything.
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
            # An idle thread must not keep the arguments of its last job alive.
            del job

    def _next(self) -> _Job | None:
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return None  # the lane is closed; an ended thread counts as idle
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
            # The error's traceback refers to this frame, so the frame must not refer to the error.
            del job
