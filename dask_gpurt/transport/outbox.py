"""Queues of outgoing shards, one per peer, with back-pressure.

Producers are worker threads; senders are coroutines on the worker's event loop. While a peer takes
a message, new shards for it wait and leave together in the next one. So the number of messages
follows the bytes, not the number of shards. A producer blocks while too many bytes wait for one
peer. The caller implements the sending.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from dask_gpurt.errors import ExchangeError


class Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""


T = TypeVar("T", bound=Sized)


class _Peer(Generic[T]):
    def __init__(self) -> None:
        self.waiting: deque[T] = deque()
        self.waiting_nbytes = 0
        self.senders: set[asyncio.Task[None]] = set()


class Outbox(Generic[T]):
    """The outgoing shards of one run.

    Parameters
    ----------
    send
        Coroutine function that delivers a list of shards to a peer, and returns once the peer has
        them. It retries by itself; an error that it raises ends the outbox.
    loop
        Event loop that `send` runs on.
    limit_nbytes
        Bytes that may wait for a peer before producers block.
    message_nbytes
        Returns the size at which a message to a peer is closed.
    concurrency
        Messages in flight to one peer. Two hide the wait for the acknowledgement.

    Attributes
    ----------
    limit_nbytes
        May be changed at any time.
    """

    def __init__(
        self,
        send: Callable[[str, Sequence[T]], Awaitable[None]],
        loop: asyncio.AbstractEventLoop,
        *,
        limit_nbytes: int,
        message_nbytes: Callable[[str], int],
        concurrency: int = 2,
    ) -> None:
        self._send = send
        self._loop = loop
        self.limit_nbytes = limit_nbytes
        self._message_nbytes = message_nbytes
        self._concurrency = concurrency
        self._peers: dict[str, _Peer[T]] = {}
        # Guards the queues; held for moments only, never over a send.
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def waiting_nbytes(self) -> int:
        """Bytes that wait or are in flight."""
        with self._changed:
            return sum(peer.waiting_nbytes for peer in self._peers.values())

    def put(self, peer: str, shards: Sequence[T]) -> None:
        """Queue shards for a peer. Blocks while too many bytes wait for it; call from a thread.

        Raises
        ------
        BaseException
            An earlier `send`, to this or any other peer, raised it.
        """
        nbytes = sum(shard.nbytes for shard in shards)
        with self._changed:
            queue = self._peers.setdefault(peer, _Peer())
            while queue.waiting_nbytes >= self.limit_nbytes and not self._stopped:
                self._changed.wait()
            self._raise_if_failed()
            if self._closed:
                return
            queue.waiting.extend(shards)
            queue.waiting_nbytes += nbytes
        self._loop.call_soon_threadsafe(self._wake, peer)

    async def flush(self) -> None:
        """Wait until all shards put so far are delivered.

        Raises
        ------
        BaseException
            A `send` raised it.
        """
        while True:
            senders = self._senders()
            for name in list(self._peers):
                self._wake(name)
            with self._changed:
                is_waiting = any(peer.waiting for peer in self._peers.values())
            if not senders and not is_waiting:
                break
            if self._failure is not None:
                break
            senders = self._senders()
            if senders:
                await asyncio.wait(senders, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_failed()

    async def close(self) -> None:
        """Stop sending, unblock producers and drop the queues."""
        with self._changed:
            self._closed = True
            for peer in self._peers.values():
                peer.waiting.clear()
                peer.waiting_nbytes = 0
            self._changed.notify_all()
        senders = self._senders()
        for task in senders:
            task.cancel()
        if senders:
            await asyncio.wait(senders)

    def _senders(self) -> list[asyncio.Task[None]]:
        with self._changed:  # producers add peers
            return [task for peer in self._peers.values() for task in peer.senders]

    @property
    def _stopped(self) -> bool:
        return self._closed or self._failure is not None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._closed:
                self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wake(self, name: str) -> None:
        peer = self._peers[name]
        with self._changed:
            wanted = self._concurrency if peer.waiting and not self._stopped else 0
        if len(peer.senders) < wanted:
            task = self._loop.create_task(self._drain(name, peer))
            peer.senders.add(task)
            task.add_done_callback(peer.senders.discard)

    async def _drain(self, name: str, peer: _Peer[T]) -> None:
        try:
            await self._send_all(name, peer)
        finally:
            # Here and not in a callback: a wake-up in between would count this task as a sender.
            task = asyncio.current_task()
            assert task is not None
            peer.senders.discard(task)

    async def _send_all(self, name: str, peer: _Peer[T]) -> None:
        while True:
            message: list[T] = []
            message_nbytes, limit_nbytes = 0, self._message_nbytes(name)
            with self._changed:
                while peer.waiting and message_nbytes < limit_nbytes:
                    shard = peer.waiting.popleft()
                    message.append(shard)
                    message_nbytes += shard.nbytes
                    del shard  # an error keeps this frame, which would keep the last shard
            if not message or self._stopped:
                return
            try:
                await self._send(name, message)
            except asyncio.CancelledError:
                # Unless `close` cancelled it, this message is lost.
                self._fail(ExchangeError(f"sending to {name} was cancelled"))
                raise
            except BaseException as error:
                self._fail(error)
                return
            finally:
                # Free the big buffers before waiting for the next message.
                message.clear()
                with self._changed:
                    if not self._closed:
                        peer.waiting_nbytes -= message_nbytes
                    self._changed.notify_all()
