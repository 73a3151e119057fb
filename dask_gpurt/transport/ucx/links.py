"""State of UCX links and transfers: memory that UCX still uses, and futures that wait for it.

Plain records that `transport.ucx.thread` drives; only its thread touches them. They poll requests,
and post none themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from dask_gpurt.errors import TransportError
from dask_gpurt.transport.ucx.protocol import (
    SMALL_NBYTES,
    Buffer,
    Descriptor,
    Greeting,
    parcel_lengths,
    unseal,
)


def resolve(future: Future[None]) -> None:
    """Set a result, unless the waiting caller has cancelled."""
    try:
        future.set_result(None)
    except InvalidStateError:
        pass


def reject(future: Future[None], error: BaseException) -> None:
    """Set an error, unless the waiting caller has cancelled."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass


class Transfer:
    """UCX requests, and the memory that they use.

    A transfer keeps the memory until its last request is complete, even after it failed for the
    caller.
    """

    def __init__(self, link: UcxLink | None, future: Future[None] | None = None) -> None:
        self.link = link
        self.future = future
        self.nbytes = 0
        self.is_failed = False
        self._requests: deque[Any] = deque()
        self._held: list[Buffer] = []

    def add(self, request: Any, buffer: Buffer) -> None:
        self._held.append(buffer)
        self._requests.append(request)
        self.nbytes += len(buffer)

    def poll(self) -> BaseException | None:
        """Drop completed requests; return the first error among them."""
        error: BaseException | None = None
        while self._requests and self._requests[0].completed:
            try:
                self._requests.popleft().check_error()
            except Exception as problem:  # one class per status of UCX
                error = error or problem
        return error

    @property
    def is_done(self) -> bool:
        """Whether UCX is done with the memory, and no more requests will be posted."""
        return not self._requests and not self._is_open

    @property
    def _is_open(self) -> bool:
        return False

    def check(self) -> None:
        """Read what UCX has moved; raise ProtocolError if it is not what was announced."""

    def succeed(self) -> None:
        if self.future is not None:
            resolve(self.future)

    def fail(self, error: BaseException) -> None:
        """Fail the transfer: post no more requests; UCX finishes those in flight."""
        self.is_failed = True
        if self.future is not None:
            reject(self.future, error)


class Send(Transfer):
    """An outgoing message."""

    def __init__(self, link: UcxLink, number: int, future: Future[None]) -> None:
        super().__init__(link, future)
        self.number = number


class Receive(Transfer):
    """An announced message, and the memory for it."""

    def __init__(self, number: int, buffers: Sequence[Buffer], future: Future[None]) -> None:
        super().__init__(None, future)
        self.number = number
        self.buffers = buffers
        envelope_nbytes = parcel_lengths([len(buffer) for buffer in buffers])[0]
        large = [buffer for buffer in buffers if len(buffer) >= SMALL_NBYTES]
        #: Destination of each parcel.
        self.parcels = [np.empty(envelope_nbytes, dtype=np.uint8), *large]
        self.n_posted = 0

    @property
    def is_posted(self) -> bool:
        return self.n_posted == len(self.parcels)

    @property
    def _is_open(self) -> bool:
        return not self.is_failed and not self.is_posted

    def check(self) -> None:
        unseal(self.parcels[0], self.number, self.buffers)


class UcxLink:
    """A UCX endpoint, and what is known of its other side.

    Attributes
    ----------
    channel
        Upper half of the tags of incoming messages.
    to_channel
        Upper half of the tags of outgoing messages, chosen by the other side.
    peer
        Set once the other side is verified.
    descriptor
        Descriptor of the engine that this side connects to; None if the other side connected.
    """

    def __init__(self, channel: int, descriptor: Descriptor | None = None) -> None:
        self.channel = channel
        self.descriptor = descriptor
        self.endpoint: Any = None
        self.to_channel = 0
        self.peer: Peer | None = None
        self.is_lost = False
        #: Parcels of messages that no caller has asked for yet, by number.
        self.arrived: dict[int, list[Any]] = {}
        self.n_arrived = 0
        #: Messages with parcels still to come, by number.
        self.receives: dict[int, Receive] = {}
        #: The request that receives the greeting.
        self.greeting: Any = None
        self.greeting_buffer: Buffer | None = None
        #: Futures that wait for the other side to be verified.
        self.waiters: list[Future[None]] = []

    @property
    def is_ours(self) -> bool:
        """Whether this side connected."""
        return self.descriptor is not None

    @property
    def other_side(self) -> str:
        """Name of the other side for messages."""
        if self.peer is not None:
            return self.peer.token
        return self.descriptor.token if self.descriptor else "an unidentified peer"

    def take_arrived(self, number: int) -> list[Any]:
        """Remove and return the parcels of a message that no caller has asked for yet."""
        parcels = self.arrived.pop(number, [])
        self.n_arrived -= len(parcels)
        return parcels

    def read_greeting(self) -> Greeting | None:
        """Return the other side's greeting, or None if it has not arrived.

        Raises
        ------
        Exception
            It is malformed, or UCX could not receive it.
        """
        if self.greeting is None or not self.greeting.completed:
            return None
        self.greeting.check_error()
        assert self.greeting_buffer is not None
        greeting = Greeting.decode(self.greeting_buffer.tobytes())
        self.greeting = self.greeting_buffer = None
        return greeting

    def reject_waiters(self, error: BaseException) -> None:
        """Fail the callers that wait for the other side to be verified."""
        for future in self.waiters:
            reject(future, error)

    def why_broken(self) -> str:
        """Return UCX's reason for a closed endpoint."""
        try:
            self.endpoint.raise_on_error()
        except Exception as error:
            return f"the other side is gone: {error}"
        return "the other side closed it"


class Peer:
    """Another engine: its links, and the messages expected from it.

    If both sides have connected there are two links, and each side sends on its own.
    """

    #: Remembered numbers of messages that either side cancelled before they were asked for and
    #: here.
    N_UNWANTED = 1 << 16

    def __init__(self, token: str) -> None:
        self.token = token
        self.links: list[UcxLink] = []
        self.connecting: UcxLink | None = None
        self.waiting: dict[int, Receive] = {}
        self._unwanted: dict[int, None] = {}

    @property
    def is_reachable(self) -> bool:
        return bool(self.links) or self.connecting is not None

    def expected(self, number: int) -> Receive | None:
        """Return the receive that waits for a message or for parcels of it."""
        receives = (link.receives.get(number) for link in self.links)
        return self.waiting.get(number) or next(filter(None, receives), None)

    def why_not(self, number: int) -> Exception | None:
        """Return the error of a receive that cannot begin, or None if it can."""
        if self.expected(number) is not None:
            return ValueError(f"message {number} of {self.token} is being received")
        return self.retracted(number) if self.refuses(number) else None

    def retracted(self, number: int) -> TransportError:
        """Return the error of a receive whose message will not come."""
        return TransportError(f"message {number} of {self.token} was retracted")

    def lose(self, link: UcxLink) -> list[Receive]:
        """Remove a link; return the messages that will not arrive any more."""
        is_theirs = link in self.links and not link.is_ours
        if link in self.links:
            self.links.remove(link)
        if self.connecting is link:
            self.connecting = None
        # A peer sends on its own link, if it has one.
        if self.is_reachable and not is_theirs:
            return []
        lost = list(self.waiting.values())
        for number in [*self.waiting, *link.arrived]:
            self.refuse(number)
        self.waiting.clear()
        return lost

    def refuse(self, number: int) -> None:
        """Mark a message as unwanted: drop what still arrives of it, and fail later receives."""
        self._unwanted[number] = None
        if len(self._unwanted) > self.N_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]

    def refuses(self, number: int) -> bool:
        return number in self._unwanted


def counted(transfers: list[Any], peers: list[Any], links: list[Any]) -> dict[str, int]:
    """Return the number of unfinished transfers of each kind, including announced messages."""
    receives = sum(isinstance(transfer, Receive) for transfer in transfers)
    return {
        "sends": sum(isinstance(transfer, Send) for transfer in transfers),
        "receives": receives + sum(len(peer.waiting) for peer in peers),
        "unclaimed_parcels": sum(link.n_arrived for link in links),
    }
