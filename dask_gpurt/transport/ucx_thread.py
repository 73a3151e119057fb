"""The thread that owns UCX: it makes progress, and sleeps when nothing is to do.

It has a context and a worker of UCX of its own, beside whatever else in the process uses UCX. All
calls to UCX are made in this thread; others hand it functions with `call`. It waits in `epoll` on
two descriptors: the one UCX signals when a peer or a device did something, and an eventfd for
`call`. UCX must be *armed* before each wait, which it refuses while events are pending; so no
event falls between the last look and the wait, and nothing polls while idle.

What it is that moves is `transport.ucx_switchboard`'s business.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from dask_gpurt.errors import TransportError
from dask_gpurt.transport.ucx_switchboard import Switchboard

#: While closing: how often UCX is asked whether it is done with what it was told to drop, and how
#: often without any news before it is ended without an answer. A peer that hangs never answers.
_CLOSING_PERIOD_S, _N_CLOSING_PERIODS = 0.02, 50

#: How long the end of the process waits for a thread that nobody has closed.
_EXIT_S = 5.0


class UcxThread:
    """A context and a worker of UCX, and the loop that drives them.

    Parameters
    ----------
    host
        Address under which peers reach this process.
    options
        Options of UCX without the prefix `UCX_`, for this context alone.

    Attributes
    ----------
    started
        Resolves to the switchboard, or to why there is none.
    finished
        Resolves once UCX has been let go of.
    why_ended
        What those are told who come too late.
    transports
        Names of the transports that UCX has to choose from.
    """

    def __init__(self, host: str, options: Mapping[str, str]) -> None:
        self._host = host
        self._options = dict(options)
        self.started: Future[Switchboard] = Future()
        self.finished: Future[None] = Future()
        self.why_ended = "the UCX engine is closed"
        self.transports: list[str] = []
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards the eventfd's end: its number may be another file's afterwards.
        self._wake_lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="gpurt-ucx", daemon=True)
        # A daemon thread that the interpreter leaves behind inside UCX, holding its locks, would
        # have UCX wait for it for ever as it is unloaded.
        atexit.register(self._exit)
        self._thread.start()

    def _exit(self) -> None:
        self.close()
        # Not for the thread itself: one that UCX is not done with stays.
        wait([self.finished], _EXIT_S)

    def close(self) -> None:
        """End the thread soon, which `finished` tells; from any thread."""
        self.call(self._close)

    def _close(self) -> None:
        if self.started.exception() is None:  # calls run once it is known
            self.started.result().close()

    def call(self, function: Callable[[], None]) -> bool:
        """Have the thread call this soon; from any thread. Must not raise. False once it ended."""
        with self._wake_lock:
            if self._has_ended:
                return False
            self._calls.append(function)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def _run(self) -> None:
        try:
            board, worker = self._start()
        except Exception as error:
            reason = f"UCX does not start: {error}"
            if isinstance(error, ImportError):
                reason = f"no UCX without ucxx (dask-gpurt[ucx] installs it): {error}"
            self.started.set_exception(TransportError(reason))
            self._end()
            return
        self.started.set_result(board)
        try:
            self._serve(board, worker)
        except Exception as error:  # a bug, or UCX in a state that it cannot get out of
            self.why_ended = f"the UCX thread ended: {error!r}"
            board.problems.append(self.why_ended)
            with contextlib.suppress(Exception):
                board.close(self.why_ended)
                # If UCX still works, peers hear that their links have ended.
                self._serve(board, worker)
        finally:
            del worker  # the board's is the last one
            is_dropped = board.drop()
            self._end()
            self.finished.set_result(None)
            if not is_dropped:
                # For ever: what a thread has is left alone as the interpreter ends. Taken apart in
                # whatever order comes, UCX with something under way crashes the process.
                threading.Event().wait()

    def _start(self) -> tuple[Switchboard, Any]:
        import ucxx  # here: it loads UCX, and costs half a second
        from ucxx._lib.arr import Array

        _make_device_current()
        library = ucxx.libucxx
        feature = library.Feature
        features = (feature.TAG, feature.WAKEUP, feature.STREAM)
        context = library.UCXContext(self._options, features)
        rows = [line.split() for line in context.info.splitlines() if "resource" in line]
        self.transports = sorted({row[-1].split("/")[0] for row in rows if "flags" in row})
        worker = library.UCXWorker(context)
        worker.init_blocking_progress_mode()
        return Switchboard(library, Array, worker, self._host), worker

    def _serve(self, board: Switchboard, worker: Any) -> None:
        n_periods = 0
        with select.epoll() as epoll:
            epoll.register(self._wake_fd, select.EPOLLIN)
            epoll.register(worker.epoll_file_descriptor, select.EPOLLIN)
            while True:
                self._run_calls()
                worker.progress()
                board.look()
                if board.is_closing and (board.is_idle or n_periods >= _N_CLOSING_PERIODS):
                    return
                if not self._calls and worker.arm():
                    if not epoll.poll(_CLOSING_PERIOD_S if board.is_closing else None):
                        n_periods += 1
                    try:
                        os.eventfd_read(self._wake_fd)
                    except BlockingIOError:
                        pass

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _end(self) -> None:
        """Take no more calls, after those that came while UCX was closed."""
        with self._wake_lock:
            self._has_ended = True
            os.close(self._wake_fd)
        atexit.unregister(self._exit)
        while self._calls:
            # What ended the thread may make each of them fail; whoever made it is told by itself.
            with contextlib.suppress(Exception):
                self._run_calls()


def _make_device_current() -> None:
    """Have this thread use the device that the process computes on, before UCX looks for one.

    UCX copies device memory in the context that is current in its thread. A process that has none
    computes on the host, and must not get one for this: it costs hundreds of MB of a device.
    """
    # No library, no driver or no device: UCX will find none either.
    with contextlib.suppress(Exception):
        from cuda.bindings import driver

        driver.cuInit(0)
        _, device = driver.cuDeviceGet(0)
        _, _, is_active = driver.cuDevicePrimaryCtxGetState(device)
        if is_active:
            from cuda.core import Device

            Device(0).set_current()
