"""The links, transfers and unclaimed messages of one UCX engine.

UCX's interface decides some of the design:

- A tag receive does not report the length of the message. So messages are probed first, which tells
  their length and takes them out of the queue, and then received by handle.
- A matched receive cannot be cancelled, so `posted_transfers` keeps its buffers to the end.
- A sender of a large message is done only once it was received. So no message is left unread:
  unwanted ones are received into throw-away memory.
- A tag does not tell which endpoint a message came by. So greetings travel on the endpoint's
  stream, and each side gives the other a channel number to put into its tags.

All methods but reports run in the thread of `transport.ucx.thread`. `transport.ucx.engine` handles
the timeouts of messages.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import chain
from time import monotonic
from typing import Any

import numpy as np

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.transport.ucx import links
from dask_gpurt.transport.ucx.context import UcxContext
from dask_gpurt.transport.ucx.invited_peers import InvitedPeers
from dask_gpurt.transport.ucx.links import Peer, Receive, Send, Transfer, UcxLink, reject, resolve
from dask_gpurt.transport.ucx.posted_transfers import PostedTransfers
from dask_gpurt.transport.ucx.protocol import (
    GREETING_NBYTES,
    REFUSED,
    SMALL_NBYTES,
    TOKEN_NBYTES,
    Buffer,
    Descriptor,
    Greeting,
    make_tag,
    read_tag,
    seal,
)
from dask_gpurt.transport.ucx.unwanted_parcels import UnwantedParcels

#: Limit of unverified connections; a further one replaces the oldest.
_N_UNVERIFIED = 16
#: Limit of unclaimed parcels of one link. Large ones are still at their sender.
_N_UNCLAIMED = 1 << 16
#: Timeout of a new link, and the time for which UCX may make connections for it.
_LINK_S = 30.0

_NOBODY = "0" * 2 * TOKEN_NBYTES


class Switchboard:
    """The links and transfers of one engine over one UCX worker.

    Parameters
    ----------
    ucx
        Worker and listener, for this engine alone until it closes.
    host
        Address for the descriptor.
    """

    def __init__(self, ucx: UcxContext, host: str) -> None:
        library = ucx.library
        self._ucx, self._library, self._array, self._worker = ucx, library, ucx.array, ucx.worker
        self._any_tag = (library.UCXXTag(0), library.UCXXTagMask(0))
        self.counters: Counter[str] = Counter()
        self.problems: deque[str] = deque(maxlen=16)
        self._peers: dict[str, Peer] = {}
        self._links: dict[int, UcxLink] = {}
        #: Links whose other side is not verified yet.
        self._unverified: dict[int, UcxLink] = {}
        #: Channels of failed endpoints, as reported by UCX's callbacks.
        self._failed: deque[int] = deque()
        self._transfers = PostedTransfers(ucx, self.counters, self.problems, self._lose)
        #: Lost links on which UCX still moves data, by channel.
        self._draining: dict[int, UcxLink] = {}
        #: Closing endpoints, with the requests that complete when they are closed.
        self._closing: list[tuple[Any, Any]] = []
        self.is_closing = False
        self.invited = InvitedPeers(ucx.sockets)
        self._unwanted = UnwantedParcels(ucx, self.counters, self._transfers.add)
        self._token, key = os.urandom(TOKEN_NBYTES).hex(), os.urandom(TOKEN_NBYTES).hex()
        self.descriptor = Descriptor(host, ucx.port, self._token, key)

    def held_nbytes(self) -> int:
        """Return the bytes of messages that UCX still works on; from any thread."""
        return sum(transfer.nbytes for transfer in self._transfers)

    def under_way(self) -> dict[str, int]:
        """Return the number of unfinished transfers of each kind; from any thread."""
        held = list(self._transfers), list(self._peers.values()), list(self._links.values())
        n_closing = len(self._draining) + len(self._closing)
        return {**links.counted(*held), "closing_links": n_closing}

    def peers(self) -> dict[str, int]:
        """Return the number of links to each connected peer; from any thread."""
        return {peer.token: len(peer.links) for peer in list(self._peers.values()) if peer.links}

    @property
    def is_idle(self) -> bool:
        """Whether UCX has no work in flight."""
        return not self._transfers and not self._draining and not self._closing

    def close(self, why: str = "the UCX engine was closed") -> None:
        """Close all links and fail all transfers. Closing is complete once `is_idle`."""
        self.is_closing = True
        error = TransportError(why)
        # Tell waiting callers first: UCX may be in a state in which it closes nothing.
        for peer in self._peers.values():
            for receive in peer.waiting.values():
                receive.fail(error)
        self._transfers.fail_all(error)
        for link in self._links.values():
            link.reject_waiters(error)
        for link in list(self._links.values()):
            self._lose(link, why)

    def invite(self, token: str, deadline_s: float, future: Future[None]) -> None:
        """Allow the engine of that token to connect within this time."""
        self.invited.expect(token, monotonic() + deadline_s)
        resolve(future)

    def poll(self) -> None:
        """Process the results of UCX's progress."""
        if self.invited.poll(monotonic()):
            self._lose_unverified("no expected peer connected in time")
        while self._ucx.callers:
            self._accept(self._ucx.callers.popleft())
        while self._failed:
            link = self._links.get(self._failed.popleft())
            if link is not None:
                self._lose(link, link.why_broken())
        for link in list(self._unverified.values()):
            self._read_greeting(link)
        while (probe := self._worker.tag_probe(*self._any_tag, remove=True)).matched:
            self._arrive(*read_tag(probe.sender_tag.value), probe)
        self._transfers.poll()
        for link in list(self._draining.values()):
            self._close_if_drained(link)
        if self._closing:
            self._closing = [pair for pair in self._closing if not pair[1].completed]

    def _new_link(self, descriptor: Descriptor | None = None) -> UcxLink:
        while (channel := int.from_bytes(os.urandom(4), "little")) in self._links | self._draining:
            pass
        link = UcxLink(channel, descriptor)
        self._links[channel] = self._unverified[channel] = link
        return link

    def _attach(self, link: UcxLink, endpoint: Any) -> None:
        link.endpoint = endpoint
        # By number: a callback with a reference to the link would keep itself alive.
        endpoint.set_close_callback(self._failed.append, (link.channel,))
        link.greeting_buffer = np.zeros(GREETING_NBYTES, dtype=np.uint8)
        link.greeting = endpoint.stream_recv(self._array(link.greeting_buffer))

    def _greet(self, link: UcxLink, greeting: Greeting) -> None:
        raw = np.frombuffer(greeting.encode(), dtype=np.uint8)
        transfer = Transfer(link)
        transfer.add(link.endpoint.stream_send(self._array(raw)), raw)
        self._transfers.add(transfer)

    def connect(self, descriptor: Descriptor, future: Future[None]) -> None:
        """Resolve the future once this engine has its own link to another one; make one if needed.

        It makes its own link even if the other engine has made one. On one TCP connection, UCX's
        replies to incoming data wait behind large outgoing data. Where the network was the limit,
        both directions over one link took twice as long as over two.
        """
        if self.is_closing:
            reject(future, TransportError("the UCX engine is closed"))
            return
        peer = self._peers.setdefault(descriptor.token, Peer(descriptor.token))
        if any(link.is_ours for link in peer.links):
            resolve(future)
        elif peer.connecting is not None:
            peer.connecting.waiters.append(future)
        else:
            link = peer.connecting = self._new_link(descriptor)
            link.waiters.append(future)
            # The peer's UCX connects back for a part of its transports.
            self.invited.expect(descriptor.token, monotonic() + _LINK_S)
            try:
                self._attach(link, self._ucx.endpoint_to(descriptor.host, descriptor.port))
                self._greet(link, Greeting(self._token, descriptor.key, link.channel))
            except Exception as error:  # one class per status of UCX
                self._lose(link, str(error))

    def cancel_connect(self, token: str, future: Future[None]) -> None:
        """Handle a caller that no longer waits for a link."""
        link = peer.connecting if (peer := self._peers.get(token)) is not None else None
        if link is not None and future in link.waiters:
            link.waiters.remove(future)
            if not link.waiters:
                self._lose(link, "no caller waits for it")

    def _lose_unverified(self, reason: str) -> None:
        """Close all incoming links that are not verified."""
        for link in list(self._unverified.values()):
            if not link.is_ours:
                self._lose(link, reason)

    def _reject_caller(self, request: int) -> None:
        """Accept and close a connection, or the caller's socket would stay open."""
        with suppress(Exception):
            endpoint = self._ucx.endpoint_of(request)
            self._closing.append((endpoint, endpoint.close()))

    def _accept(self, request: int) -> None:
        if self.is_closing or not self.invited.any_expected:
            self._reject_caller(request)
            return
        callers = [link for link in self._unverified.values() if link.descriptor is None]
        if len(callers) >= _N_UNVERIFIED:
            self._lose(callers[0], "too many unidentified connections")
        link = self._new_link()
        try:
            self._attach(link, self._ucx.endpoint_of(request))
        except Exception as error:
            self._lose(link, str(error))

    def _read_greeting(self, link: UcxLink) -> None:
        """Admit a link once its other side is verified."""
        try:
            greeting = link.read_greeting()
        except Exception as error:
            self._lose(link, str(error))
            return
        if greeting is None:
            return
        if link.descriptor is None:
            if greeting.key != self.descriptor.key:
                self.problems.append("refused a connection that was meant for another engine")
                # The caller reads this, knows why, and closes.
                self._greet(link, Greeting(_NOBODY, _NOBODY, 0, REFUSED))
                return
        elif greeting.verdict == REFUSED or greeting.token != link.descriptor.token:
            self._lose(link, "another engine answered: the worker that was there is gone")
            return
        del self._unverified[link.channel]
        link.to_channel = greeting.channel
        peer = self._peers.setdefault(greeting.token, Peer(greeting.token))
        link.peer = peer
        peer.links.append(link)
        self.counters["links_made"] += 1
        self.invited.settle(greeting.token, monotonic())
        if link.descriptor is None:
            # Until this arrives, the peer sends nothing, so nothing arrives before it is admitted.
            self._greet(link, Greeting(self._token, _NOBODY, link.channel))
        else:
            peer.connecting = None
            for future in link.waiters:
                resolve(future)
            link.waiters.clear()
        for number in [number for number in link.arrived if number in peer.waiting]:
            self._bind(link, peer.waiting.pop(number))

    def _lose(self, link: UcxLink, reason: str) -> None:
        """Close a link: fail its transfers, and let UCX finish with their memory."""
        if link.is_lost:
            return
        link.is_lost = True
        self._draining[link.channel] = self._links.pop(link.channel)
        self._unverified.pop(link.channel, None)
        message = f"UCX link to {link.other_side}: {reason}"
        if not self.is_closing:
            self.problems.append(message)
        self.counters["links_lost"] += 1
        for probe in chain.from_iterable(link.arrived.values()):
            self._unwanted.drop(probe, link)
        link.receives.clear()
        waiting = self._remove_from_peer(link)
        # Last: callers that are told must find the link gone.
        self._fail_all(link, waiting, TransportError(message))

    def _remove_from_peer(self, link: UcxLink) -> list[Receive]:
        """Remove a link from its peer; return the messages that will not arrive any more."""
        peer = self._peers.get(link.descriptor.token) if link.descriptor else link.peer
        if peer is None:
            return []
        waiting = peer.lose(link)
        if not peer.is_reachable:
            del self._peers[peer.token]
        return waiting

    def _fail_all(self, link: UcxLink, waiting: Sequence[Receive], error: TransportError) -> None:
        """Fail these messages, and all transfers and callers of a link."""
        for receive in waiting:
            receive.fail(error)
        self._transfers.fail_link(link, error)
        link.reject_waiters(error)

    def _close_if_drained(self, link: UcxLink) -> None:
        """Close a lost link's endpoint once UCX moves no more data on it.

        UCX would write data that arrives on a closed endpoint through freed memory. The other side
        knows what this side will not send, and this side receives or drops what the other sends.
        """
        is_alive = link.endpoint is not None and link.endpoint.alive
        # Without a peer the transfer is a greeting, which would never complete if no peer reads it.
        if is_alive and link.peer and any(transfer.link is link for transfer in self._transfers):
            return
        if is_alive:
            # Forced: do not wait for a peer that may be gone. A failed endpoint is skipped: `ucxx`
            # has closed it, and would return no request to poll.
            try:
                self._closing.append((link.endpoint, link.endpoint.close()))
            except Exception as why:  # other links and waiting callers must still end
                self.problems.append(f"closing a UCX link failed: {why!r}")
        del self._draining[link.channel]  # last: a link is always in one of the two

    def disconnect(self, token: str, future: Future[None]) -> None:
        """Close the links to a peer. Their transfers in flight fail."""
        peer = self._peers.get(token)
        if peer is not None:
            for link in [*peer.links, *([peer.connecting] if peer.connecting else [])]:
                self._lose(link, "disconnected here")
        resolve(future)

    def _link_to(self, token: str, number: int) -> UcxLink:
        peer = self._peers.get(token)
        if peer is None or not peer.links:
            raise TransportError(f"message {number}: no UCX link to {token}")
        return next((link for link in peer.links if link.is_ours), peer.links[-1])

    def send(
        self, token: str, number: int, buffers: Sequence[Buffer], future: Future[None]
    ) -> None:
        """Post a message. Resolve the future when UCX no longer needs the buffers."""
        try:
            link = self._link_to(token, number)
        except TransportError as error:
            reject(future, error)
            return
        large = [buffer for buffer in buffers if len(buffer) >= SMALL_NBYTES]
        tag = make_tag(link.to_channel, number)
        self._transfers.post(Send(link, number, future), link, tag, [seal(number, buffers), *large])

    def cancel_send(self, future: Future[None]) -> None:
        """Cancel a send; tell the receiver to drop the parts it has."""
        self._transfers.cancel_send(future)

    def retract(self, token: str, number: int) -> None:
        """Tell a peer to drop a message that it will not ask for, even if all of it has left."""
        with suppress(TransportError):  # a lost link has nothing left to retract
            self._transfers.retract(self._link_to(token, number), number)

    def receive(
        self, token: str, number: int, buffers: Sequence[Buffer], future: Future[None]
    ) -> None:
        """Resolve the future once these buffers hold that message."""
        peer = self._peers.get(token)
        if peer is None or not peer.is_reachable:
            reject(future, TransportError(f"message {number}: no UCX link to {token}"))
            return
        if (why_not := peer.why_not(number)) is not None:
            reject(future, why_not)
            return
        receive = Receive(number, buffers, future)
        for link in peer.links:
            if number in link.arrived:
                self._bind(link, receive)
                return
        peer.waiting[number] = receive

    def _bind(self, link: UcxLink, receive: Receive) -> None:
        receive.link = link
        link.receives[receive.number] = receive
        self._transfers.add(receive)
        for probe in link.take_arrived(receive.number):
            self._take(link, receive, probe)

    def cancel_receive(self, token: str, number: int, future: Future[None]) -> None:
        """Cancel a receive; drop the parts that arrive."""
        peer = self._peers.get(token)
        if peer is None:
            return
        waiting = peer.waiting.get(number)
        if waiting is not None and waiting.future is future:
            del peer.waiting[number]
            peer.refuse(number)
            return
        self._transfers.cancel_receive(token, number, future)

    def _arrive(self, channel: int, number: int, is_retraction: bool, probe: Any) -> None:
        """Dispatch a parcel to the message that waits for it."""
        link = self._links.get(channel)
        known = link or self._draining.get(channel)
        if known is None or not (known.peer or known.is_ours):
            self._lose_unverified("it sent a message before it identified itself")
            self._unwanted.refuse(probe)
        elif link is None:
            self._unwanted.drop(probe, known)
        elif is_retraction:
            self._unwanted.drop(probe, link)
            for unwanted in link.take_arrived(number):
                self._unwanted.drop(unwanted, link)
            if link.peer is not None:
                self._retracted(link.peer, number)
        elif number in link.receives:
            self._take(link, link.receives[number], probe)
        elif link.peer is not None and number in link.peer.waiting:
            self._bind(link, link.peer.waiting.pop(number))
            self._take(link, link.receives[number], probe)
        elif link.peer is not None and link.peer.refuses(number):
            self._unwanted.drop(probe, link)
        else:
            link.arrived.setdefault(number, []).append(probe)
            link.n_arrived += 1
            if link.n_arrived > _N_UNCLAIMED:
                self._lose(link, "too many unclaimed messages")

    def _retracted(self, peer: Peer, number: int) -> None:
        """Fail a receive at once whose message the peer will not send, or not in full."""
        peer.refuse(number)
        if (receive := peer.expected(number)) is not None:
            peer.waiting.pop(number, None)
            self._transfers.fail(receive, peer.retracted(number))

    def _take(self, link: UcxLink, receive: Receive, probe: Any) -> None:
        """Receive a parcel into its destination, if it has exactly the expected length."""
        if receive.is_failed or receive.is_posted:
            self._unwanted.drop(probe, link)
            return
        parcel = receive.parcels[receive.n_posted]
        if probe.length != len(parcel):
            problem = ProtocolError(
                f"message {receive.number}: parcel {receive.n_posted} has {probe.length} bytes "
                f"where {len(parcel)} were announced"
            )
            self._unwanted.drop(probe, link)
            self._transfers.fail(receive, problem)
            return
        # Checked above: by handle UCX would write as many bytes as were sent.
        receive.add(self._worker.tag_recv_with_handle(self._array(parcel), probe), parcel)
        receive.n_posted += 1
        if receive.n_posted == len(receive.parcels):
            del link.receives[receive.number]
