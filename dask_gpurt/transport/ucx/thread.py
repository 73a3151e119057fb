"""The thread that owns UCX: it drives progress, and sleeps when there is no work.

It has a UCX context and worker of its own, beside other users of UCX in the process. Only this
thread calls UCX; other threads pass it functions with `Session.call`. It waits in `epoll` on two
descriptors: UCX signals one when a peer or a device acted, and `call` signals an eventfd. UCX must
be *armed* before each wait, and refuses while events are pending. So no event is lost between the
last check and the wait, and nothing polls while idle.

An engine closes its links, but the thread stays. It rejects new connections, and serves the next
engine with the same options: UCX cannot be destroyed while peers may connect, see
`transport.ucx.context`. `transport.ucx.switchboard` implements links and messages.
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
from dask_gpurt.transport.ucx import context
from dask_gpurt.transport.ucx.listening_sockets import ListeningSockets
from dask_gpurt.transport.ucx.switchboard import Switchboard

#: While closing: the interval at which UCX is polled for dropped transfers, and the number of
#: intervals without news after which the thread stops waiting. A hung peer never answers.
_CLOSING_PERIOD_S, _N_CLOSING_PERIODS = 0.02, 50
#: While closing: the longest wait for the next transfer to end, even while UCX has news. UCX has
#: them without end while it waits for an event of a device.
_CLOSING_S = 5.0

#: Maximum number of progress steps between two polls.
_N_STEPS = 64

#: Timeout for a thread at the end of the process.
_EXIT_S = 5.0


#: Why UCX does not work in a process that was forked from one that uses it.
_FORKED = "UCX was in use when this process was forked, and does not work in a forked process"


class Session:
    """One engine's use of a thread that owns UCX.

    Attributes
    ----------
    host
        Address under which peers reach this process.
    started
        Resolves to the switchboard, or to the error that prevented it.
    finished
        Resolves once all links are closed, or as many as can be.
    why_ended
        Error message for late calls.
    transports
        Names of the transports that UCX can choose from.
    """

    def __init__(self, host: str, thread: UcxThread) -> None:
        self.host = host
        self.started: Future[Switchboard] = Future()
        self.finished: Future[None] = Future()
        self.why_ended = "the UCX engine is closed"
        self.transports: list[str] = []
        self._thread = thread
        self._calls: deque[Callable[[], None]] = deque()
        # Guards the end: no call is added after the last check for calls.
        self._lock = threading.Lock()
        self._has_ended = False

    def close(self) -> None:
        """Request the end of this session, which `finished` reports; from any thread."""
        self.call(self._close)

    def _close(self) -> None:
        if self.started.exception() is None:  # calls run after the start only
            self.started.result().close()

    def call(self, function: Callable[[], None]) -> bool:
        """Schedule a call in the thread; from any thread. Must not raise. Return False after the
        end.
        """
        with self._lock:
            if self._has_ended:
                return False
            self._calls.append(function)
            self._thread.wake()
        return True

    @property
    def has_calls(self) -> bool:
        """Whether calls are pending."""
        return bool(self._calls)

    def run_calls(self) -> None:
        """Run the pending calls. In the thread."""
        while self._calls:
            self._calls.popleft()()

    def forget(self) -> None:
        """End in a forked child, which has no such thread."""
        # The thread that held the lock, and the waiting callers, do not exist here.
        self._lock = threading.Lock()
        self._has_ended, self.why_ended = True, _FORKED
        self._calls.clear()
        self.started, self.finished = Future(), Future()
        self.started.set_exception(TransportError(_FORKED))
        self.finished.set_result(None)

    def end(self) -> None:
        """Refuse further calls, after those added while links were closing. In the thread."""
        with self._lock:
            self._has_ended = True
        while self._calls:
            # The error that ended the thread may make each call fail; each reports to its caller.
            with contextlib.suppress(Exception):
                self.run_calls()
        self.finished.set_result(None)


class UcxThread:
    """A UCX context and worker, and the loop that drives them for one engine after another.

    Parameters
    ----------
    host
        Address to listen at.
    options
        UCX options without the prefix `UCX_`, for this context alone.
    """

    #: Threads whose engine has closed, by the inputs of their context, and their lock.
    _free: ClassVar[dict[object, list[UcxThread]]] = {}
    _free_lock: ClassVar = threading.Lock()
    #: All threads that were started, except those that failed to start.
    _begun: ClassVar[list[UcxThread]] = []
    #: Whether this process was forked from one that had any.
    _is_forked: ClassVar = False

    def __init__(self, host: str, options: Mapping[str, str]) -> None:
        self._host, self._options = host, dict(options)
        self._sockets: ListeningSockets | None = None
        self._made_of: object = None
        self._session: Session | None = None
        #: The last session's switchboard. If a peer hung, it holds memory that may still be
        #: written.
        self._board: Switchboard | None = None
        self._wakeup = Wakeup()
        self._is_exiting = False
        #: Resolves once the thread will not call UCX any more.
        self._has_left: Future[None] = Future()
        # At exit the interpreter abandons daemon threads. One that is inside UCX and holds its
        # locks would block UCX's unloading for ever.
        atexit.register(self._exit)
        self._begun.append(self)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="gpurt-ucx", daemon=True)

    @classmethod
    def begin(cls, host: str, options: Mapping[str, str]) -> Session:
        """Return a session with a free thread or a new one.

        Raises
        ------
        OSError
            The process has reached its limit of open files.
        RuntimeError
            It has reached its limit of threads, or was forked from a process with an engine.
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
        """Wake the thread; from any thread."""
        self._wakeup.set()

    def _forget(self) -> None:
        """Unregister a thread that did not start."""
        atexit.unregister(self._exit)
        self._begun.remove(self)
        self._wakeup.close()

    @classmethod
    def _leave_to_parent(cls) -> None:
        """Keep a forked child from touching its parent's UCX.

        The threads do not exist in the child. Their objects are never freed, because their frames
        reference them.
        """
        cls._free_lock = threading.Lock()
        cls._free.clear()
        cls._is_forked = cls._is_forked or bool(cls._begun)
        for thread in cls._begun:
            atexit.unregister(thread._exit)
            if thread._sockets is not None:
                thread._sockets.leave_to_parent()
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
            ucx = context.load(self._options, self._host)
            self._sockets = ucx.sockets
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
        # Only now: `ucxx` sets environment variables when it is imported.
        self._made_of = _made_of(self._host, self._options)
        with epoll:
            # Between engines there is no caller to tell; the next engine gets another thread.
            with contextlib.suppress(Exception):
                self._serve_all(ucx, epoll)
            self._leave()
        # Wait for ever, so that the interpreter leaves the thread's objects alone at exit.
        # Destroyed in arbitrary order, a UCX with transfers in flight crashes the process.
        threading.Event().wait()

    def _leave(self) -> None:
        """Stop calling UCX, and fail a session that has just begun."""
        with self._free_lock:
            for free in self._free.values():
                if self in free:
                    free.remove(self)
        self._has_left.set_result(None)
        if self._session is not None:  # it has just begun
            self._session.started.set_exception(TransportError("the UCX thread has ended"))
            self._session.end()

    def _serve_all(self, ucx: context.UcxContext, epoll: select.epoll) -> None:
        while (session := self._session) is not None:
            board = self._board = Switchboard(ucx, session.host)
            board.problems.extend(ucx.problems)
            session.transports = ucx.transports
            session.started.set_result(board)
            is_sound = True
            try:
                self._serve(ucx, epoll, board, session)
            except Exception as error:  # a bug, or UCX in a state it cannot leave
                is_sound = False
                session.why_ended = f"the UCX thread ended: {error!r}"
                board.problems.append(session.why_ended)
                with contextlib.suppress(Exception):
                    board.close(session.why_ended)
                    # If UCX still works, this tells peers that their links have ended.
                    self._serve(ucx, epoll, board, session)
            finally:
                self._session = None
                if is_sound and board.is_idle:
                    # Before `end` below: a caller that waits for it may begin the next session.
                    with self._free_lock:
                        self._free.setdefault(self._made_of, []).append(self)
                session.end()
            if not board.is_idle:
                return  # a peer hung: a network card might still write
            self._wait_for_next(ucx, epoll, board)

    def _serve(
        self,
        ucx: context.UcxContext,
        epoll: select.epoll,
        board: Switchboard,
        session: Session,
    ) -> None:
        """Serve the engine until it has closed, as far as possible."""
        n_periods, held_nbytes, give_up_s = 0, -1, 0.0
        while True:
            session.run_calls()
            _progress(ucx)
            board.poll()
            if board.is_closing:
                if board.held_nbytes() != held_nbytes:
                    held_nbytes, give_up_s = board.held_nbytes(), monotonic() + _CLOSING_S
                is_hung = n_periods >= _N_CLOSING_PERIODS or monotonic() >= give_up_s
                if board.is_idle or is_hung:
                    return
            if not session.has_calls and not self._sleep(ucx, epoll, board):
                n_periods += 1

    def _wait_for_next(
        self, ucx: context.UcxContext, epoll: select.epoll, board: Switchboard
    ) -> None:
        """Reject connections until there is another session, or the process ends."""
        while True:
            _progress(ucx)
            board.poll()
            if self._is_exiting or (self._session is not None and board.is_idle):
                return
            self._sleep(ucx, epoll, board)

    def _sleep(self, ucx: context.UcxContext, epoll: select.epoll, board: Switchboard) -> bool:
        """Wait for work. Return False if only the interval has passed."""
        if not ucx.worker.arm():
            return True
        is_closing = board.is_closing and not board.is_idle
        wait_s = _CLOSING_PERIOD_S if is_closing else board.invited.wait_s(monotonic())
        has_news = bool(epoll.poll(wait_s))
        self._wakeup.clear()
        return has_news


def _progress(ucx: context.UcxContext) -> None:
    """Drive UCX's progress, with a limit in case a peer sends without end."""
    for _ in range(_N_STEPS):
        if not ucx.worker.progress_once():
            return


def _made_of(host: str, options: Mapping[str, str]) -> object:
    """Return the inputs of a context: address, options, and UCX's environment variables."""
    ours = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
    return host, tuple(sorted(options.items())), tuple(sorted(ours.items()))


os.register_at_fork(after_in_child=UcxThread._leave_to_parent)
