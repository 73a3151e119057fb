"""The transports from this worker to one peer: each sends a message and returns the answer.

`shuffle.messages` encodes a message, and `plugins.shuffle.peer_links` picks the transport.
Control messages always use Dask's own connections; a transport decides where the payload is.
`HostRefusals` remembers which hosts share no memory with this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.patches.p2p import delivered, to_serialize
from dask_gpurt.plugins.shuffle.peer_connections import PeerConnections
from dask_gpurt.plugins.shuffle.worker_ucx import RefusedError
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.shuffle.routing import host_of
from dask_gpurt.transport.host_readings import HostReadings
from dask_gpurt.transport.rate import LinkRate
from dask_gpurt.transport.shared import Lender, seal

if TYPE_CHECKING:
    from dask_gpurt.transport.ucx.engine import UcxEngine

#: Sends a control message with these contents and returns the peer's answer.
Call = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Answer = dict[str, Any]

#: Timeout of one message over UCX. A peer that takes longer to make room does not read.
MESSAGE_DEADLINE_S = 120.0


class HostRefusals:
    """Refusals of shared memory. If one worker of a host refuses, its others are not asked.

    A cluster of 1,000 workers on 125 hosts would otherwise ask a million times. Workers at this
    worker's own host name are each asked: some may be in containers, and others not. On the event
    loop.

    Parameters
    ----------
    address
        Address of this worker.
    """

    def __init__(self, address: str) -> None:
        self._own = host_of(address)
        #: By host, why it refused; an empty text if it did not.
        self._answers: dict[str, asyncio.Future[str]] = {}

    async def ask(self, address: str, offer: Callable[[], Awaitable[Any]]) -> None:
        """Make an offer to a peer, unless another worker of its host has refused.

        Raises
        ------
        RefusedError
            The peer refused now, or another worker of its host did earlier.
        Exception
            The offer raised it.
        """
        host = host_of(address)
        if host == self._own:
            await offer()
            return
        answer = self._answers.get(host)
        # Shielded: other links wait for the answer too.
        if answer is not None and (why_not := await asyncio.shield(answer)):
            raise RefusedError(why_not)
        answer = self._answers[host] = asyncio.get_running_loop().create_future()
        try:
            await offer()
        except RefusedError as error:
            answer.set_result(str(error))
            raise
        finally:
            if not answer.done():
                answer.set_result("")

    def clear(self) -> None:
        self._answers.clear()


class CommTransport:
    """Payload inside the control message, through Dask's connection.

    Attributes
    ----------
    address
        Address of the peer.
    why_not
        Reason for each better transport that is not used.
    device_codecs
        Numbers of the device codecs that both ends have.
    """

    name = "comm"
    #: Whether the bytes stay on this host.
    is_local = False
    #: Whether buffers may be in device memory, at both ends.
    takes_device_memory = False
    device_codecs: Set[int] = frozenset()

    def __init__(self, connections: PeerConnections, address: str, why_not: dict[str, str]) -> None:
        self.address = address
        self.why_not = why_not
        self._connections = connections
        self._rate = LinkRate()

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, None if unknown."""
        return self._rate.bandwidth

    async def send(self, message: Message, call: Call) -> Answer:
        payload = [to_serialize(buffer.data) for buffer in message.buffers]
        answer = await call({"header": message.header, "payload": payload})
        self._rate.add(delivered(self._connections.to(self.address)))
        return answer


class SharedTransport:
    """Payload in memory that the peer reads."""

    name = "shared"
    is_local = True
    takes_device_memory = False
    device_codecs: Set[int] = frozenset()
    bandwidth = None

    def __init__(self, lender: Lender, address: str, why_not: dict[str, str]) -> None:
        self.address = address
        self.why_not = why_not
        self._lender = lender

    async def send(self, message: Message, call: Call) -> Answer:
        # Small buffers are not in shared memory; sending them is cheap.
        places = [self._lender.place(buffer) or buffer.tobytes() for buffer in message.buffers]
        token = self._lender.descriptor["token"]
        payload = {"by": self.name, "token": token, "places": places, "seal": seal(token, places)}
        return await call({"header": message.header, "payload": payload})


class UcxTransport:
    """Payload through UCX endpoints of this package.

    Parameters
    ----------
    takes_device_memory
        Whether UCX at both ends supports device memory.
    readings
        TCP readings of this process's connections to the peer's host; None if UCX does not use TCP.
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
        """Bytes a second if UCX uses TCP; None otherwise, or if unknown."""
        return self._rate.bandwidth

    async def send(self, message: Message, call: Call) -> Answer:
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
                    # If the send fails, its error comes sooner than the peer's answer.
                    await sending
                answer = await answering
                if was_taken := answer["status"] == "OK":
                    await sending
                    await self._read_rate(sum(map(len, buffers)))
                return answer
            finally:
                answering.cancel()
        finally:
            # Stop sending what the peer refused; the peer drops the parts that arrived.
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


Transport = CommTransport | SharedTransport | UcxTransport
