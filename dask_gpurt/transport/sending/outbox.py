"""Queues of outgoing shards, one per peer, with back-pressure.

Producers are worker threads; sends are coroutines on the worker's event loop. A message costs its
two ends the same time at any size, so small shards leave together. A message waits a moment for
more shards. While a peer takes a message, new shards for that peer wait. A producer blocks while
the worker's `SendBudget` has no room for its peer. The caller implements the sending.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from dask_gpurt.errors import ExchangeError
from dask_gpurt.transport.sending.send_budget import SendBudget


class Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""


T = TypeVar("T", bound=Sized)

#: Peers with messages under way at a time. More would not fill a link better, but every message
#: has a connection, and memory at its receiver.
WINDOW = 32
#: How long a message that is not full waits for more shards.
HOLD_S = 0.01


class _Peer(Generic[T]):
    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[T] = deque()
        #: Bytes of `waiting`.
        self.queued_nbytes = 0
        #: Bytes that wait or are in flight.
        self.nbytes = 0
        #: Messages in flight.
        self.n_sending = 0
        #: Whether the loop is to look at this peer, or has it in its line for the window.
        self.is_told = False
        self.is_in_line = False


class Outbox(Generic[T]):
    """The outgoing shards of one run.

    Parameters
    ----------
    send
        Coroutine function that delivers a list of shards to a peer, and returns once the peer has
        them. It retries by itself; an error that it raises ends the outbox.
    loop
        Event loop that `send` runs on.
    budget
        Shared by all outboxes of this worker.
    message_nbytes
        Returns the size at which a message to a peer is closed.
    concurrency
        Returns the most messages in flight to a peer. Two hide the wait for the acknowledgement.
    window
        Peers that messages are in flight to at a time. They take turns.
    hold_s
        How long a message that is not full waits for more shards. It does not wait while a
        producer is blocked or `flush` is called.
    """

    def __init__(
        self,
        send: Callable[[str, Sequence[T]], Awaitable[None]],
        loop: asyncio.AbstractEventLoop,
        *,
        budget: SendBudget,
        message_nbytes: Callable[[str], int],
        concurrency: Callable[[str], int],
        window: int = WINDOW,
        hold_s: float = HOLD_S,
    ) -> None:
        self._send = send
        self._loop = loop
        self._budget = budget
        self._message_nbytes = message_nbytes
        self._concurrency = concurrency
        self._window = window
        self._hold_s = hold_s
        # Guards the queues; held for moments only, never over a send.
        self._changed: threading.Condition = budget.changed
        self._peers: dict[str, _Peer[T]] = {}
        #: Peers that got shards since the loop last looked.
        self._told: list[_Peer[T]] = []
        self._is_waking = False
        self._n_blocked = 0
        self._nbytes = 0
        #: Shards that wait or are in flight.
        self._n_shards = 0
        self._failure: BaseException | None = None
        self._closed = False
        # The rest belongs to the event loop.
        self._tasks: set[asyncio.Task[None]] = set()
        self._n_active = 0
        #: Peers with a message to send that wait for a place in the window.
        self._line: deque[_Peer[T]] = deque()
        #: Peers that wait for more shards, and the timers that end it.
        self._held: dict[_Peer[T], asyncio.TimerHandle] = {}
        self._flushes: set[asyncio.Future[None]] = set()

    @property
    def waiting_nbytes(self) -> int:
        """Bytes that wait or are in flight."""
        return self._nbytes

    def put(self, name: str, shards: Sequence[T]) -> None:
        """Queue shards for a peer. Blocks while the budget has no room; call from a thread.

        Raises
        ------
        BaseException
            An earlier `send`, to this or any other peer, raised it.
        """
        with self._changed:
            peer = self._peers.get(name)
            if peer is None:
                peer = self._peers[name] = _Peer(name)
            for shard in shards:
                if not self._budget.has_room(shard.nbytes, peer.nbytes):
                    self._wait_for_room(shard.nbytes, peer)
                if self._closed:
                    return
                self._raise_if_failed()
                self._queue(peer, shard)
            self._wake_soon()

    def _wait_for_room(self, nbytes: int, peer: _Peer[T]) -> None:
        self._n_blocked += 1
        try:
            # Nothing may wait for more shards while its bytes are needed.
            self._wake_soon()
            while not self._stopped and not self._budget.has_room(nbytes, peer.nbytes):
                self._changed.wait()
        finally:
            self._n_blocked -= 1

    def _queue(self, peer: _Peer[T], shard: T) -> None:
        nbytes = shard.nbytes
        peer.waiting.append(shard)
        peer.queued_nbytes += nbytes
        peer.nbytes += nbytes
        self._nbytes += nbytes
        self._n_shards += 1
        self._budget.take(nbytes)
        if not peer.is_told:
            peer.is_told = True
            self._told.append(peer)

    def _wake_soon(self) -> None:
        # One wake-up serves all puts until the loop gets it. Each writes to a socket, and the
        # thread then loses the interpreter lock.
        if not self._is_waking:
            self._is_waking = True
            self._loop.call_soon_threadsafe(self._wake)

    async def flush(self) -> None:
        """Wait until all shards put so far are delivered.

        Raises
        ------
        BaseException
            A `send` raised it.
        """
        done = self._loop.create_future()
        self._flushes.add(done)
        try:
            self._wake()
            self._end_flushes()
            await done
        finally:
            self._flushes.discard(done)
        self._raise_if_failed()

    def _end_flushes(self) -> None:
        if not self._n_shards or self._stopped:
            for done in self._flushes:
                if not done.done():
                    done.set_result(None)

    async def close(self) -> None:
        """Stop sending, unblock producers and drop the queues."""
        with self._changed:
            self._closed = True
            self._budget.give_back(self._nbytes)
            self._nbytes = self._n_shards = 0
            for peer in self._peers.values():
                peer.waiting.clear()
                peer.queued_nbytes = peer.nbytes = 0
        self._line.clear()
        for peer in tuple(self._held):
            self._release(peer)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._end_flushes()

    @property
    def _stopped(self) -> bool:
        return self._closed or self._failure is not None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._closed:
                self._failure = self._failure or error
                # Other runs need the room. `_deliver` gives back what is in flight.
                for peer in self._peers.values():
                    self._budget.give_back(peer.queued_nbytes)
                    self._nbytes -= peer.queued_nbytes
                    self._n_shards -= len(peer.waiting)
                    peer.nbytes -= peer.queued_nbytes
                    peer.queued_nbytes = 0
                    peer.waiting.clear()
            self._changed.notify_all()
        self._end_flushes()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ------------------------------------------------------------------ on the loop

    def _wake(self) -> None:
        """Look at the peers that got shards, and at all that wait for more if none may wait."""
        with self._changed:
            self._is_waking = False
            told, self._told = self._told, []
            for peer in told:
                peer.is_told = False
        for peer in told:
            self._look_at(peer)
        if self._must_send_now:
            for peer in tuple(self._held):
                self._send_now(peer)

    @property
    def _must_send_now(self) -> bool:
        return bool(self._flushes or self._n_blocked or self._hold_s <= 0)

    def _look_at(self, peer: _Peer[T]) -> None:
        """Send a message to a peer if there is one to send now; else let it wait for more."""
        if not peer.waiting or peer.is_in_line or self._stopped:
            return
        if self._must_send_now or peer.queued_nbytes >= self._message_nbytes(peer.name):
            self._send_now(peer)
        elif peer not in self._held:
            self._held[peer] = self._loop.call_later(self._hold_s, self._send_now, peer)

    def _release(self, peer: _Peer[T]) -> None:
        timer = self._held.pop(peer, None)
        if timer is not None:
            timer.cancel()

    def _send_now(self, peer: _Peer[T]) -> None:
        self._release(peer)
        if self._stopped:
            return
        if not peer.n_sending:
            peer.is_in_line = True
            self._line.append(peer)
            self._fill_window()
        elif not self._line and peer.n_sending < self._concurrency(peer.name):
            # While others wait for the window, a peer leaves it after its messages in flight.
            self._start(peer)

    def _fill_window(self) -> None:
        while self._line and self._n_active < self._window:
            peer = self._line.popleft()
            peer.is_in_line = False
            self._n_active += 1
            self._start(peer)

    def _start(self, peer: _Peer[T]) -> None:
        message, nbytes = self._next_message(peer)
        peer.n_sending += 1
        task = self._loop.create_task(self._deliver(peer, message, nbytes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._look_at(peer)

    def _next_message(self, peer: _Peer[T]) -> tuple[list[T], int]:
        message: list[T] = []
        nbytes, limit_nbytes = 0, self._message_nbytes(peer.name)
        with self._changed:
            while peer.waiting and nbytes < limit_nbytes:
                message.append(peer.waiting.popleft())
                nbytes += message[-1].nbytes
            peer.queued_nbytes -= nbytes
        return message, nbytes

    async def _deliver(self, peer: _Peer[T], message: list[T], nbytes: int) -> None:
        n_shards = len(message)
        try:
            await self._send(peer.name, message)
        except asyncio.CancelledError:
            # Unless `close` cancelled it, this message is lost.
            self._fail(ExchangeError(f"sending to {peer.name} was cancelled"))
            raise
        except BaseException as error:
            self._fail(error)
        finally:
            # Free the big buffers before waiting for the next message.
            message.clear()
            with self._changed:
                if not self._closed:
                    peer.nbytes -= nbytes
                    self._nbytes -= nbytes
                    self._n_shards -= n_shards
                    self._budget.give_back(nbytes)
            self._sent(peer)

    def _sent(self, peer: _Peer[T]) -> None:
        # In the task and not in its callback: a wake-up in between would count it as in flight.
        peer.n_sending -= 1
        if not peer.n_sending:
            self._n_active -= 1
        if self._stopped:
            return
        if peer.waiting:
            # These shards have waited for an answer already.
            self._send_now(peer)
        self._fill_window()
        self._end_flushes()
