"""The thread that owns UCX: it makes progress, and sleeps when nothing is to do.

It has a context and a worker of UCX of its own, beside whatever else in the process uses UCX. All
calls to UCX are made in this thread; others hand it functions with `Session.call`. It waits in
`epoll` on two descriptors: the one UCX signals when a peer or a device did something, and an
eventfd for `call`. UCX must be *armed* before each wait, which it refuses while events are pending;
so no event falls between the last look and the wait, and nothing polls while idle.

What an engine closes are its links. The thread stays, turns away whoever still connects, and serves
the next engine with the same options: UCX cannot be taken apart while others may connect, see
`transport.ucx_context`. What it is that moves is `transport.ucx_switchboard`'s business.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from time import monotonic
from typing import ClassVar

from dask_gpurt.errors import TransportError
from dask_gpurt.system_calls import Wakeup
from dask_gpurt.transport import ucx_context
from dask_gpurt.transport.ucx_door import Door
from dask_gpurt.transport.ucx_switchboard import Switchboard

#: While closing: how often UCX is asked whether it is done with what it was told to drop, and how
#: often without any news before it is left without an answer. A peer that hangs never answers.
_CLOSING_PERIOD_S, _N_CLOSING_PERIODS = 0.02, 50

#: So much does UCX do before it is looked at what came of it.
_N_STEPS = 64

#: How long the end of the process waits for a thread.
_EXIT_S = 5.0


#: Why nothing works in a process that was forked from one that uses UCX.
_FORKED = "UCX was in use when this process was forked, and does not work in a forked process"


class Session:
    """One engine's time with a thread that owns UCX.

    Attributes
    ----------
    host
        Address under which peers reach this process.
    started
        Resolves to the switchboard, or to why there is none.
    finished
        Resolves once all links are closed, or as many as can be.
    why_ended
        What those are told who come too late.
    transports
        Names of the transports that UCX has to choose from.
    """

    def __init__(self, host: str, thread: UcxThread) -> None:
        self.host = host
        self.started: Future[Switchboard] = Future()
        self.finished: Future[None] = Future()
        self.why_ended = "the UCX engine is closed"
        self.transports: list[str] = []
        self._thread = thread
        self._calls: deque[Callable[[], None]] = deque()
        # Guards the end: no call comes after the last look for calls.
        self._lock = threading.Lock()
        self._has_ended = False

    def close(self) -> None:
        """End this soon, which `finished` tells; from any thread."""
        self.call(self._close)

    def _close(self) -> None:
        if self.started.exception() is None:  # calls run once it is known
            self.started.result().close()

    def call(self, function: Callable[[], None]) -> bool:
        """Have the thread call this soon; from any thread. Must not raise. False once it ended."""
        with self._lock:
            if self._has_ended:
                return False
            self._calls.append(function)
            self._thread.wake()
        return True

    @property
    def has_calls(self) -> bool:
        """Whether there is something to do that nobody else tells of."""
        return bool(self._calls)

    def run_calls(self) -> None:
        """Do what was asked for. In the thread."""
        while self._calls:
            self._calls.popleft()()

    def forget(self) -> None:
        """Be at an end in a forked child, which has no such thread."""
        # Whoever held the lock, or waited for one of these, is not there any more either.
        self._lock = threading.Lock()
        self._has_ended, self.why_ended = True, _FORKED
        self._calls.clear()
        self.started, self.finished = Future(), Future()
        self.started.set_exception(TransportError(_FORKED))
        self.finished.set_result(None)

    def end(self) -> None:
        """Take no more calls, after those that came while links were closed. In the thread."""
        with self._lock:
            self._has_ended = True
        while self._calls:
            # What ended the thread may make each of them fail; whoever made it is told by itself.
            with contextlib.suppress(Exception):
                self.run_calls()
        self.finished.set_result(None)


class UcxThread:
    """A context and a worker of UCX, and the loop that drives them for one engine after another.

    Parameters
    ----------
    host
        Address to listen at.
    options
        Options of UCX without the prefix `UCX_`, for this context alone.
    """

    #: Threads whose engine has closed, by what their context was made of, and their guard.
    _free: ClassVar[dict[object, list[UcxThread]]] = {}
    _free_lock: ClassVar = threading.Lock()
    #: All threads that were ever begun, and have not failed to start.
    _begun: ClassVar[list[UcxThread]] = []
    #: This process was forked from one that had any.
    _is_forked: ClassVar = False

    def __init__(self, host: str, options: Mapping[str, str]) -> None:
        self._host, self._options = host, dict(options)
        self._door: Door | None = None
        self._made_of: object = None
        self._session: Session | None = None
        #: Of the last session; where its peer hung, it holds memory that may still be written to.
        self._board: Switchboard | None = None
        self._wakeup = Wakeup()
        self._is_exiting = False
        #: Resolves once the thread calls UCX no more.
        self._has_left: Future[None] = Future()
        # A daemon thread that the interpreter leaves behind inside UCX, holding its locks, would
        # have UCX wait for it for ever as it is unloaded.
        atexit.register(self._exit)
        self._begun.append(self)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="gpurt-ucx", daemon=True)

    @classmethod
    def begin(cls, host: str, options: Mapping[str, str]) -> Session:
        """A session, with a thread that is free or a new one.

        Raises
        ------
        OSError
            The process may have no more files.
        RuntimeError
            It may have no more threads, or was forked from one that had an engine.
        """
        if cls._is_forked:
            raise RuntimeError(_FORKED)
        with cls._free_lock:
            free = cls._free.get(_made_of(host, options))
            thread = free.pop() if free else cls(host, options)
            session = thread._session = Session(host, thread)
            thread._sessions.add(session)
        if thread._thread.is_alive():
            thread.wake()
        else:
            try:
                thread._thread.start()
            except RuntimeError:
                thread._forget()
                raise
        return session

    def wake(self) -> None:
        """Have the thread look around; from any thread."""
        self._wakeup.set()

    def _forget(self) -> None:
        """There is nothing to be ended."""
        atexit.unregister(self._exit)
        self._begun.remove(self)
        self._wakeup.close()

    @classmethod
    def _leave_to_parent(cls) -> None:
        """Have a forked child touch nothing of UCX, which is its parent's.

        The threads are not there. What they had is never freed: it is referenced by their frames.
        """
        cls._free_lock = threading.Lock()
        cls._free.clear()
        cls._is_forked = cls._is_forked or bool(cls._begun)
        for thread in cls._begun:
            atexit.unregister(thread._exit)
            if thread._door is not None:
                thread._door.leave_to_parent()
            for session in list(thread._sessions):
                session.forget()
        cls._begun.clear()

    def _exit(self) -> None:
        session = self._session
        if session is not None:
            session.close()
        self._is_exiting = True
        self.wake()
        wait([self._has_left], _EXIT_S)

    def _run(self) -> None:
        try:
            epoll = select.epoll()
            epoll.register(self._wakeup.fd, select.EPOLLIN)
            ucx = ucx_context.load(self._options, self._host)
            self._door = ucx.door
            epoll.register(ucx.worker.epoll_file_descriptor, select.EPOLLIN)
        except Exception as error:
            reason = f"UCX does not start: {error}"
            if isinstance(error, ImportError):
                reason = f"no UCX without ucxx (dask-gpurt[ucx] installs it): {error}"
            assert self._session is not None
            self._session.started.set_exception(TransportError(reason))
            self._session.end()
            self._forget()
            return
        self._made_of = _made_of(
            self._host, self._options
        )  # now: `ucxx` sets variables when it is imported
        with epoll:
            # Between engines there is nobody to tell; whoever comes next gets another thread.
            with contextlib.suppress(Exception):
                self._serve_all(ucx, epoll)
            self._leave()
        # For ever: what a thread has is left alone as the interpreter ends. Taken apart in
        # whatever order comes, UCX with something under way crashes the process.
        threading.Event().wait()

    def _leave(self) -> None:
        """Call UCX no more, nor let anybody wait for it."""
        with self._free_lock:
            for free in self._free.values():
                if self in free:
                    free.remove(self)
        self._has_left.set_result(None)
        if self._session is not None:  # it has just begun
            self._session.started.set_exception(TransportError("the UCX thread has ended"))
            self._session.end()

    def _serve_all(self, ucx: ucx_context.UcxContext, epoll: select.epoll) -> None:
        while (session := self._session) is not None:
            board = self._board = Switchboard(ucx, session.host)
            session.transports = ucx.transports
            session.started.set_result(board)
            is_sound = True
            try:
                self._serve(ucx, epoll, board, session)
            except Exception as error:  # a bug, or UCX in a state that it cannot get out of
                is_sound = False
                session.why_ended = f"the UCX thread ended: {error!r}"
                board.problems.append(session.why_ended)
                with contextlib.suppress(Exception):
                    board.close(session.why_ended)
                    # If UCX still works, peers hear that their links have ended.
                    self._serve(ucx, epoll, board, session)
            finally:
                self._session = None
                if is_sound and board.is_idle:
                    # Before whoever waits for the end asks for the next one.
                    with self._free_lock:
                        self._free.setdefault(self._made_of, []).append(self)
                session.end()
            if not board.is_idle:
                return  # for a peer hung: a network card might still write
            self._wait_for_next(ucx, epoll, board)

    def _serve(
        self,
        ucx: ucx_context.UcxContext,
        epoll: select.epoll,
        board: Switchboard,
        session: Session,
    ) -> None:
        """Do what is asked for until the engine has closed, or as much of it as can be."""
        n_periods = 0
        while True:
            session.run_calls()
            _progress(ucx)
            board.look()
            if board.is_closing and (board.is_idle or n_periods >= _N_CLOSING_PERIODS):
                return
            if not session.has_calls and not self._sleep(ucx, epoll, board):
                n_periods += 1

    def _wait_for_next(
        self, ucx: ucx_context.UcxContext, epoll: select.epoll, board: Switchboard
    ) -> None:
        """Turn callers away until there is another session, or the process ends."""
        while True:
            _progress(ucx)
            board.look()
            if self._is_exiting or (self._session is not None and board.is_idle):
                return
            self._sleep(ucx, epoll, board)

    def _sleep(self, ucx: ucx_context.UcxContext, epoll: select.epoll, board: Switchboard) -> bool:
        """Wait until there is something to do. False if it is only time to ask again."""
        if not ucx.worker.arm():
            return True
        is_closing = board.is_closing and not board.is_idle
        wait_s = _CLOSING_PERIOD_S if is_closing else board.guests.wait_s(monotonic())
        has_news = bool(epoll.poll(wait_s))
        self._wakeup.clear()
        return has_news


def _progress(ucx: ucx_context.UcxContext) -> None:
    """Have UCX do what there is to do, but not for ever if somebody sends without an end."""
    for _ in range(_N_STEPS):
        if not ucx.worker.progress_once():
            return


def _made_of(host: str, options: Mapping[str, str]) -> object:
    """What makes a context what it is: address, its own options, and those of the environment."""
    ours = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
    return host, tuple(sorted(options.items())), tuple(sorted(ours.items()))


os.register_at_fork(after_in_child=UcxThread._leave_to_parent)
