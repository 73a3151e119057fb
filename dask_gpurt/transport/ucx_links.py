"""State of links and transfers: what UCX still reads or writes, and who waits for it.

Plain records that `transport.ucx_thread` drives; only its thread touches them. They poll requests
that it made and post none themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import numpy as np

from dask_gpurt.transport.ucx_protocol import (
    SMALL_NBYTES,
    Buffer,
    Descriptor,
    Greeting,
    parcel_lengths,
    unseal,
)


def resolve(future: Future[None]) -> None:
    """Set a result, unless whoever waited for it has cancelled."""
    try:
        future.set_result(None)
    except InvalidStateError:
        pass


def reject(future: Future[None], error: BaseException) -> None:
    """Set an error, unless whoever waited for it has cancelled."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        pass


class Transfer:
    """Requests of UCX, and the memory they work on.

    The memory is held until the last request is complete, also when the transfer has long failed
    for whoever asked for it.
    """

    def __init__(self, link: Link | None, future: Future[None] | None = None) -> None:
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
        """Forget requests that are complete; returns what one of them failed of."""
        error: BaseException | None = None
        while self._requests and self._requests[0].completed:
            try:
                self._requests.popleft().check_error()
            except Exception as problem:  # one class per status of UCX
                error = error or problem
        return error

    @property
    def is_done(self) -> bool:
        """UCX is done with the memory, and nothing more will be posted."""
        return not self._requests and not self._is_open

    @property
    def _is_open(self) -> bool:
        return False

    def succeed(self) -> None:
        if self.future is not None:
            resolve(self.future)

    def fail(self, error: BaseException) -> None:
        """Nothing more will be posted; what is under way goes on until UCX is done with it."""
        self.is_failed = True
        if self.future is not None:
            reject(self.future, error)


class Send(Transfer):
    """A message on its way out."""

    def __init__(self, link: Link, number: int, future: Future[None]) -> None:
        super().__init__(link, future)
        self.number = number


class Receive(Transfer):
    """A message that is announced, and the memory for it."""

    def __init__(self, number: int, buffers: Sequence[Buffer], future: Future[None]) -> None:
        super().__init__(None, future)
        self.number = number
        self.buffers = buffers
        envelope_nbytes = parcel_lengths([len(buffer) for buffer in buffers])[0]
        large = [buffer for buffer in buffers if len(buffer) >= SMALL_NBYTES]
        #: Where each parcel goes.
        self.parcels = [np.empty(envelope_nbytes, dtype=np.uint8), *large]
        self.n_posted = 0

    @property
    def is_posted(self) -> bool:
        return self.n_posted == len(self.parcels)

    @property
    def _is_open(self) -> bool:
        return not self.is_failed and not self.is_posted

    def succeed(self) -> None:
        unseal(self.parcels[0], self.number, self.buffers)
        super().succeed()


class Link:
    """An endpoint of UCX and what is known of the other side.

    Attributes
    ----------
    channel
        Upper half of the tags of what comes in.
    to_channel
        Upper half of the tags of what goes out, as the other side asked for.
    peer
        Set once the other side has proven itself.
    descriptor
        Of the engine this side connects to; None where the other side connected.
    """

    def __init__(self, channel: int, descriptor: Descriptor | None = None) -> None:
        self.channel = channel
        self.descriptor = descriptor
        self.endpoint: Any = None
        self.to_channel = 0
        self.peer: Peer | None = None
        self.is_lost = False
        #: Parcels of messages that nobody has asked for yet, by number.
        self.arrived: dict[int, list[Any]] = {}
        self.n_arrived = 0
        #: Messages of which some parcels are still to come, by number.
        self.receives: dict[int, Receive] = {}
        #: The receipt of the greeting.
        self.greeting: Any = None
        self.greeting_buffer: Buffer | None = None
        #: Who waits for the other side to prove itself.
        self.waiters: list[Future[None]] = []

    @property
    def is_ours(self) -> bool:
        """Whether this side connected."""
        return self.descriptor is not None

    def read_greeting(self) -> Greeting | None:
        """What the other side greets with, once it is here.

        Raises
        ------
        Exception
            It is no greeting, or UCX could not receive it.
        """
        if self.greeting is None or not self.greeting.completed:
            return None
        self.greeting.check_error()
        assert self.greeting_buffer is not None
        greeting = Greeting.decode(self.greeting_buffer.tobytes())
        self.greeting = self.greeting_buffer = None
        return greeting

    def why_broken(self) -> str:
        """What UCX says of an endpoint that is closed."""
        try:
            self.endpoint.raise_on_error()
        except Exception as error:
            return f"the other side is gone: {error}"
        return "the other side closed it"


class Peer:
    """Another engine: its links and the messages that are expected from it.

    There are two links where both sides have connected; each sends on its own.
    """

    #: Remembered numbers of messages that either side gave up before they were asked for and here.
    N_UNWANTED = 1 << 16

    def __init__(self, token: str) -> None:
        self.token = token
        self.links: list[Link] = []
        self.connecting: Link | None = None
        self.waiting: dict[int, Receive] = {}
        self._unwanted: dict[int, None] = {}

    @property
    def is_reachable(self) -> bool:
        return bool(self.links) or self.connecting is not None

    def expects(self, number: int) -> bool:
        return number in self.waiting or any(number in link.receives for link in self.links)

    def lose(self, link: Link) -> list[Receive]:
        """Forget a link; returns the messages that do not come any more."""
        is_theirs = link in self.links and not link.is_ours
        if link in self.links:
            self.links.remove(link)
        if self.connecting is link:
            self.connecting = None
        # What a peer sends comes by its own link, if it has one.
        if self.is_reachable and not is_theirs:
            return []
        lost = list(self.waiting.values())
        for number in [*self.waiting, *link.arrived]:
            self.refuse(number)
        self.waiting.clear()
        return lost

    def refuse(self, number: int) -> None:
        """What still comes of this message shall be dropped, and nobody shall wait for it."""
        self._unwanted[number] = None
        if len(self._unwanted) > self.N_UNWANTED:
            del self._unwanted[next(iter(self._unwanted))]

    def refuses(self, number: int) -> bool:
        return number in self._unwanted


def counted(transfers: list[Any], peers: list[Any], links: list[Any]) -> dict[str, int]:
    """How many transfers of each kind, of those that peers have announced too, are not over."""
    receives = sum(isinstance(transfer, Receive) for transfer in transfers)
    return {
        "sends": sum(isinstance(transfer, Send) for transfer in transfers),
        "receives": receives + sum(len(peer.waiting) for peer in peers),
        "unclaimed_parcels": sum(link.n_arrived for link in links),
    }
