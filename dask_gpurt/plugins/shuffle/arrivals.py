"""The receiving end of a worker's links: offers of peers, and the payloads of their messages.

`peer_links` adds the sending end. A payload comes inside its message, in memory that both
processes of one host can read (`transport.shared`), or over UCX.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.codecs import nvcomp
from dask_gpurt.errors import DamagedError, ProtocolError, TransportError
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.plugins.shuffle.payloads import is_inline, pairs, view_of
from dask_gpurt.plugins.shuffle.transports import MESSAGE_DEADLINE_S
from dask_gpurt.plugins.shuffle.worker_ucx import RefusedError, WorkerUcx
from dask_gpurt.transport.shared import Borrower, seal

if TYPE_CHECKING:
    from distributed import Worker

Buffer = npt.NDArray[np.uint8]
#: Runs a call in a thread.
InThread = Callable[[Callable[[], None]], Awaitable[None]]

#: Smaller messages in a peer's memory are read on the event loop. That takes less time than the
#: hand-over to a thread, 60 to 110 us. Warm memory is copied at 10 to 20 GB/s.
LEAST_THREAD_NBYTES = 1 << 20
#: Timeout for a new UCX link, and for closing all of them.
LINK_DEADLINE_S = 10.0


class Arrivals:
    """The receiver of what peers offer and send to one worker. On the event loop."""

    def __init__(self, worker: Worker) -> None:
        self.ucx = WorkerUcx(worker)
        self._borrower = Borrower(event_loop(worker))

    async def accept(self, offers: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a peer's offer of a transport.

        Raises
        ------
        ProtocolError
            The offer is malformed.
        """
        if not isinstance(offers, Mapping) or len(offers) != 1:
            raise ProtocolError("an offer must name exactly one path")
        ((name, offer),) = offers.items()
        try:
            ours: Any = None
            if name == "shared":
                self._borrower.open(offer)
            elif name == "ucx":
                engine = await self.ucx.engine()
                known = {"takes_device_memory": engine.takes_device_memory}
                token = offer.get("token") if isinstance(offer, Mapping) else None
                ours = {**await engine.invite(token, LINK_DEADLINE_S), **known}
            elif name == "codecs":
                ours = sorted(await asyncio.to_thread(nvcomp.usable))
            else:
                raise RefusedError(f"unknown path {name!r}")
            return {"status": "OK", "ours": ours, "why_not": None}
        except TransportError as error:
            return {"status": "OK", "ours": None, "why_not": str(error)}

    def reaches_device(self, payload: Any) -> bool:
        """Return whether the payload of a message can be written to device memory."""
        if not isinstance(payload, Mapping) or payload["by"] != "ucx":
            return False
        engine = self.ucx.started
        return engine is not None and engine.takes_device_memory

    async def fetch(
        self,
        payload: Any,
        lengths: Sequence[int],
        empty: Callable[[int, int], Buffer],
        in_thread: InThread,
    ) -> list[Buffer]:
        """Bring the payload of a message to this worker.

        Parameters
        ----------
        lengths
            Announced bytes of each buffer. Checked before anything is allocated.
        empty
            Allocates a buffer, given its number and length; in device memory if the payload can be
            written there. Called on the loop.
        in_thread
            Reads a peer's memory in a thread.

        Returns
        -------
        list of buffers
            In memory from `empty`. Buffers that came inside the message itself stay there: copying
            them is work for a thread.

        Raises
        ------
        TransportError
            The sender must offer its path again.
        DamagedError
            A checksum does not match.
        ProtocolError
            The payload is not what was announced.
        """
        if is_inline(payload):
            return [view_of(part, nbytes) for part, nbytes in pairs(payload, lengths)]
        if payload["by"] == "shared":
            if seal(payload["token"], payload["places"]) != payload["seal"]:
                raise DamagedError("places in shared memory were damaged on their way")
            return await self._borrow(
                payload["token"], payload["places"], lengths, empty, in_thread
            )
        if payload["by"] != "ucx" or self.ucx.started is None:
            raise TransportError("the message uses a path that was not offered")
        engine = await self.ucx.engine()
        buffers = [empty(number, nbytes) for number, nbytes in enumerate(lengths)]
        await engine.receive(payload["token"], payload["number"], buffers, MESSAGE_DEADLINE_S)
        return buffers

    async def _borrow(
        self,
        token: bytes,
        parts: Sequence[Any],
        lengths: Sequence[int],
        empty: Callable[[int, int], Buffer],
        in_thread: InThread,
    ) -> list[Buffer]:
        fetched, sent, lent = [], [], []
        for number, (part, nbytes) in enumerate(pairs(parts, lengths)):
            # Check all parts before reading any of them.
            if isinstance(part, bytes):
                source = view_of(part, nbytes)
                fetched.append(empty(number, nbytes))
                sent.append((source, fetched[-1]))
            else:
                places = self._borrower.checked(token, part, nbytes)
                fetched.append(empty(number, nbytes))
                lent.append((places, fetched[-1]))

        def read() -> None:
            for source, buffer in sent:
                np.copyto(buffer, source)
            if lent:
                self._borrower.read(token, lent)

        # The sender keeps its memory unchanged until this message is answered. If it cancels the
        # message, the bytes read here may be wrong, but nobody uses them. Either the sender has
        # delivered the shards again, and these are duplicates. Or its run is over.
        if sum(lengths) < LEAST_THREAD_NBYTES:
            read()
        else:
            await in_thread(read)
        return fetched
