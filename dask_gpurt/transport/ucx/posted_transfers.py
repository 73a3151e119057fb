"""The transfers that UCX works on, and their ends.

A matched receive cannot be cancelled: UCX writes until it completes or its endpoint is closed. So
the buffers of a transfer are kept until UCX is done with all its requests, even if the caller is
gone. `transport.ucx.switchboard` decides which message uses which link.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.transport.ucx.context import UcxContext
from dask_gpurt.transport.ucx.links import Receive, Send, Transfer, UcxLink
from dask_gpurt.transport.ucx.protocol import Buffer, make_tag


class PostedTransfers:
    """The unfinished transfers of one engine.

    Parameters
    ----------
    ucx
        Posts the requests.
    counters
        Counts the messages and bytes that UCX has moved.
    problems
        Gets the errors of transfers.
    on_broken
        Called with a link on which UCX takes no request, and its reason.
    """

    def __init__(
        self,
        ucx: UcxContext,
        counters: Counter[str],
        problems: deque[str],
        on_broken: Callable[[UcxLink, str], None],
    ) -> None:
        self._tag, self._array = ucx.library.UCXXTag, ucx.array
        self._counters, self._problems, self._on_broken = counters, problems, on_broken
        self._unfinished: list[Transfer] = []

    def __iter__(self) -> Iterator[Transfer]:
        """Iterate over a copy; from any thread."""
        return iter(list(self._unfinished))

    def __bool__(self) -> bool:
        return bool(self._unfinished)

    def add(self, transfer: Transfer) -> None:
        self._unfinished.append(transfer)

    def post(self, transfer: Transfer, link: UcxLink, tag: int, parcels: Sequence[Buffer]) -> None:
        """Add a transfer that sends these parcels over a link."""
        ucx_tag = self._tag(tag)
        self._unfinished.append(transfer)
        try:
            for parcel in parcels:
                transfer.add(link.endpoint.tag_send(self._array(parcel), ucx_tag), parcel)
        except Exception as error:  # one class per status of UCX
            self._on_broken(link, str(error))

    def retract(self, link: UcxLink, number: int) -> None:
        """Tell the other side of a link to drop a message."""
        tag = make_tag(link.to_channel, number, is_retraction=True)
        self.post(Transfer(link), link, tag, [np.zeros(1, dtype=np.uint8)])

    def poll(self) -> None:
        """End the transfers that UCX is done with."""
        if self._unfinished:
            self._unfinished = [one for one in self._unfinished if not self._is_over(one)]

    def _is_over(self, transfer: Transfer) -> bool:
        error = transfer.poll()
        if error is not None and not transfer.is_failed:
            self.fail(transfer, TransportError(f"UCX could not move a message: {error}"))
        if not transfer.is_done:
            return False
        if not transfer.is_failed:
            try:
                transfer.check()
            except ProtocolError as problem:
                self.fail(transfer, problem)
            else:
                kind = "received" if isinstance(transfer, Receive) else "sent"
                if isinstance(transfer, (Receive, Send)):
                    self._counters[f"{kind}_nbytes"] += transfer.nbytes
                    self._counters[f"{kind}_messages"] += 1
                transfer.succeed()  # last, so that its caller finds it counted
        return True

    def fail(self, transfer: Transfer, error: Exception) -> None:
        """Fail a transfer for its caller. Parcels that still arrive of its message are dropped."""
        if isinstance(transfer, Receive) and not transfer.is_posted and transfer.link is not None:
            transfer.link.receives.pop(transfer.number, None)
            if transfer.link.peer is not None:
                transfer.link.peer.refuse(transfer.number)
        self._problems.append(str(error))
        transfer.fail(error)

    def fail_link(self, link: UcxLink, error: TransportError) -> None:
        """Fail all transfers of a lost link, and retract its messages if the other side lives."""
        for transfer in self:
            if transfer.link is link:
                if isinstance(transfer, Send) and link.endpoint.alive:
                    self.retract(link, transfer.number)
                transfer.fail(error)

    def fail_all(self, error: Exception) -> None:
        for transfer in self._unfinished:
            transfer.fail(error)

    def cancel_send(self, future: Future[None]) -> None:
        """Cancel a send; tell the receiver to drop the parts it has."""
        for send in self._unfinished:
            if isinstance(send, Send) and send.future is future and not send.is_failed:
                send.fail(TransportError("cancelled"))
                assert send.link is not None
                self.retract(send.link, send.number)
                return

    def cancel_receive(self, token: str, number: int, future: Future[None]) -> None:
        """Cancel a receive whose first parcel came; drop the parcels that arrive."""
        for receive in self._unfinished:
            if isinstance(receive, Receive) and receive.future is future and not receive.is_failed:
                self.fail(receive, TransportError(f"message {number} of {token} was cancelled"))
