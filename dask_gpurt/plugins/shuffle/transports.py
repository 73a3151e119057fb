"""The ways from this worker to one peer: each takes a message there and brings the answer.

What is in a message is `shuffle.messages`' business, which way is taken that of
`plugins.shuffle.transport_choice`. Control messages always go through Dask's own connections; what
differs is where the payload is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.patches.p2p import delivered, to_serialize
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport.host_readings import HostReadings
from dask_gpurt.transport.rate import LinkRate
from dask_gpurt.transport.shared import Lender, seal

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.transport.ucx import UcxEngine

#: Sends a control message with these contents, and returns the peer's answer.
Call = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Answer = dict[str, Any]

#: How long one message may be under way over UCX. A peer that takes longer to make room is one that
#: does not read.
MESSAGE_DEADLINE_S = 120.0


class CommPath:
    """Inside the control message, through Dask's connection.

    Attributes
    ----------
    address
        Of the peer.
    why_not
        Reason for each better path that is not taken.
    device_codecs
        Numbers of codecs of devices that both ends have.
    """

    name = "comm"
    #: Whether bytes stay on this host.
    is_local = False
    #: Whether buffers may lie in the memory of a device, at both ends.
    takes_device_memory = False
    device_codecs: Set[int] = frozenset()

    def __init__(self, worker: Worker, address: str, why_not: dict[str, str]) -> None:
        self.address = address
        self.why_not = why_not
        self._worker = worker
        self._rate = LinkRate()

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, None if not known."""
        return self._rate.bandwidth

    async def carry(self, message: Message, call: Call) -> Answer:
        payload = [to_serialize(buffer.data) for buffer in message.buffers]
        answer = await call({"header": message.header, "payload": payload})
        self._rate.add(delivered(self._worker, self.address))
        return answer


class SharedPath:
    """In memory that the peer reads."""

    name = "shared"
    is_local = True
    takes_device_memory = False
    device_codecs: Set[int] = frozenset()
    bandwidth = None

    def __init__(self, lender: Lender, address: str, why_not: dict[str, str]) -> None:
        self.address = address
        self.why_not = why_not
        self._lender = lender

    async def carry(self, message: Message, call: Call) -> Answer:
        # Small buffers are not in shared memory; they are cheap to send.
        places = [self._lender.place(buffer) or buffer.tobytes() for buffer in message.buffers]
        token = self._lender.descriptor["token"]
        payload = {"by": self.name, "token": token, "places": places, "seal": seal(token, places)}
        return await call({"header": message.header, "payload": payload})


class UcxPath:
    """Through UCX endpoints of our own.

    Parameters
    ----------
    takes_device_memory
        UCX at both ends knows the memory of devices.
    readings
        Of this process's connections to the peer's host; None if UCX does not use TCP.
    """

    name = "ucx"
    is_local = False
    device_codecs: Set[int] = frozenset()

    def __init__(
        self,
        engine: UcxEngine,
        peer: str,
        address: str,
        why_not: dict[str, str],
        takes_device_memory: bool,
        readings: HostReadings | None,
    ) -> None:
        self.address = address
        self.why_not = why_not
        self.takes_device_memory = takes_device_memory
        self._engine = engine
        self._peer = peer
        self._readings = readings
        self._rate = LinkRate()

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second where UCX is using TCP; None if not known, and where it is not."""
        return self._rate.bandwidth

    async def carry(self, message: Message, call: Call) -> Answer:
        number = self._engine.next_number()
        buffers = message.buffers
        was_taken = False
        sending = asyncio.ensure_future(
            self._engine.send(self._peer, number, buffers, MESSAGE_DEADLINE_S)
        )
        try:
            payload = {"by": self.name, "token": self._engine.token, "number": number}
            answering = asyncio.ensure_future(call({"header": message.header, "payload": payload}))
            try:
                await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    # A send that fails is told at once; the peer's answer may take its deadline.
                    await sending
                answer = await answering
                if was_taken := answer["status"] == "OK":
                    await sending
                    await self._read_rate(sum(map(len, buffers)))
                return answer
            finally:
                answering.cancel()
        finally:
            # What the peer refused is not sent any more, and what has arrived there is dropped.
            sending.cancel()
            if not was_taken:
                self._engine.retract(self._peer, number)

    async def _read_rate(self, nbytes: int) -> None:
        if (readings := self._readings) is None:
            return
        if readings.is_quick(nbytes):
            self._rate.add(readings.after(nbytes))
        else:
            self._rate.add(await asyncio.to_thread(readings.after, nbytes))


Path = CommPath | SharedPath | UcxPath
