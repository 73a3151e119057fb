"""How shuffle bytes get from this worker to each peer: chosen once a pair, and why is kept.

Control messages always go through Dask's own connections. The payload of one goes by the best
*path* that both ends have: places in shared memory between processes of one host
(`transport.shared`), or inside the message itself. The sender offers what it has, the receiver
tries, and answers what it can use; nothing is concluded from addresses, which lie in containers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.devices.pages import SharedPages
from dask_gpurt.devices.pool import HostPool
from dask_gpurt.errors import DamagedError, LinkError, ProtocolError
from dask_gpurt.plugins.seams import delivered, event_loop, to_serialize
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport.rate import LinkRate
from dask_gpurt.transport.shared import Borrower, Lender

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.transport")

Buffer = npt.NDArray[np.uint8]
#: Sends a control message with these contents, and returns the peer's answer.
Call = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]

#: Answer of a peer that no longer knows what an earlier offer was about.
RELINK = "relink"
#: Lane of the memory that leaving shards share.
OUTGOING = "outgoing"
#: ... and of one that got something else than what was sent.
DAMAGED = "damaged"
#: So often is a message sent that is answered with one of these.
_MAX_ATTEMPTS = 3


@dataclass(eq=False)
class Path:
    """How bytes get to one peer.

    Attributes
    ----------
    address
        Of the peer.
    name
        `shared` or `comm`.
    why_not
        Reason for each better path that is not taken.
    rate
        Bandwidth, as far as is known.
    """

    address: str
    name: str
    why_not: dict[str, str] = field(default_factory=dict)
    rate: LinkRate = field(default_factory=LinkRate)

    @property
    def is_local(self) -> bool:
        """Whether bytes stay on this host."""
        return self.name == "shared"


#: Makes a message for a path.
Compose = Callable[[Path], Awaitable[Message]]


class Links:
    """Paths between one worker and its peers, both ways. On the event loop.

    Parameters
    ----------
    keep_nbytes
        Outgoing memory that may be kept warm.
    """

    def __init__(self, worker: Worker, keep_nbytes: int) -> None:
        self._worker = worker
        self._paths: dict[tuple[str, str], asyncio.Task[Path]] = {}
        self._borrower = Borrower(event_loop(worker))
        self._lender: Lender | None = None
        self._why_not: dict[str, str] = {}
        #: Where shards that leave are put together.
        self.outgoing = HostPool(keep_nbytes)
        try:
            memory = SharedPages()
            self._lender = Lender(memory)
            self.outgoing = HostPool(keep_nbytes, source=memory)
        except OSError as error:
            self._why_not["shared"] = f"no files in memory here ({error.strerror})"

    # ------------------------------------------------------------------ sending

    async def deliver(self, address: str, transport: str, compose: Compose, call: Call) -> Message:
        """Send a message and wait for the peer's answer; returns what was sent.

        Parameters
        ----------
        transport
            `auto`, or `comm` for Dask's own connections alone.
        compose
            Makes the message for the path that was chosen.
        call
            Sends a message to that peer. Its buffers may be reused once it answered.

        Raises
        ------
        DamagedError
            The message was damaged on its way, over and over again.
        LinkError
            The peer forgets over and over again what it was offered.
        """
        for _ in range(_MAX_ATTEMPTS):
            path = await self._path(address, transport, call)
            message = await compose(path)
            payload = self._payload(path, message.buffers)
            answer = await call({"header": message.header, "payload": payload})
            path.rate.add(delivered(self._worker, address))
            status = answer["status"]
            if status == RELINK:
                self._paths.pop((address, transport), None)
            elif status != DAMAGED:
                return message
        if status == RELINK:
            raise LinkError(f"{address} does not keep a link")
        raise DamagedError(
            f"{_MAX_ATTEMPTS} times in a row a message to {address} arrived damaged: the network "
            "or the memory of one of the two hosts is at fault"
        )

    def _payload(self, path: Path, buffers: Sequence[Buffer]) -> Any:
        if path.name == "comm" or self._lender is None:
            return [to_serialize(buffer.data) for buffer in buffers]
        # Small buffers are not in shared memory; they are cheap to send.
        places = [self._lender.place(buffer) or buffer.tobytes() for buffer in buffers]
        return {"token": self._lender.descriptor["token"], "places": places}

    async def _path(self, address: str, transport: str, call: Call) -> Path:
        task = self._paths.get((address, transport))
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._link(address, transport, call))
            self._paths[address, transport] = task
        # Others may be waiting for it too.
        return await asyncio.shield(task)

    async def _link(self, address: str, transport: str, call: Call) -> Path:
        if transport == "comm":
            return Path(address, "comm", {"shared": "gpurt.shuffle.transport is comm"})
        if self._lender is None:
            return Path(address, "comm", self._why_not)
        answer = await call({"offers": {"shared": self._lender.descriptor}})
        path = Path(address, answer["path"], answer["why_not"])
        logger.debug("shuffle bytes to %s go by %s %s", address, path.name, path.why_not or "")
        return path

    # ------------------------------------------------------------------ receiving

    def accept(self, offers: Mapping[str, Any]) -> dict[str, Any]:
        """Answer to a peer that wants to send, and can do so in these ways."""
        why_not = {}
        if "shared" in offers:
            try:
                self._borrower.open(offers["shared"])
                return {"status": "OK", "path": "shared", "why_not": {}}
            except LinkError as error:
                why_not["shared"] = str(error)
        return {"status": "OK", "path": "comm", "why_not": why_not}

    def fetch(
        self, payload: Any, lengths: Sequence[int], empty: Callable[[int, int], Buffer]
    ) -> list[Buffer]:
        """Bring the payload of a message into memory of ours.

        Parameters
        ----------
        lengths
            Bytes of each buffer, as announced. Checked before anything is allocated.
        empty
            Number of a buffer and its length to the memory for it.

        Raises
        ------
        LinkError
            The sender has to offer its memory again.
        ProtocolError
            The payload is not what was announced.
        """
        if isinstance(payload, Mapping):
            token, parts = payload.get("token", b""), payload.get("places", ())
        else:
            token, parts = b"", payload
        if len(parts) != len(lengths):
            raise ProtocolError(f"{len(parts)} buffers came of {len(lengths)}")
        fetched = []
        for number, (part, nbytes) in enumerate(zip(parts, lengths, strict=True)):
            if token and not isinstance(part, bytes):
                places = self._borrower.checked(token, part, nbytes)
                fetched.append(empty(number, nbytes))
                self._borrower.read(token, places, fetched[-1])
                continue
            source = np.frombuffer(part, dtype=np.uint8)
            if source.nbytes != nbytes:
                raise ProtocolError(f"{source.nbytes} bytes came of {nbytes}")
            # Out of the message's memory and into ours: a warm copy, after which the pages of
            # this shard come free together with its neighbours in time, and serve as outputs.
            fetched.append(empty(number, nbytes))
            np.copyto(fetched[-1], source)
        return fetched

    # ------------------------------------------------------------------ life

    def report(self) -> dict[str, Any]:
        """Path to each peer, for `status`."""
        found = {}
        for (address, _), task in self._paths.items():
            if task.done() and not task.cancelled() and not task.exception():
                path = task.result()
                found[address] = {
                    "path": path.name,
                    "why_not": path.why_not,
                    "bandwidth": path.rate.bandwidth,
                }
        return found

    def cool_down(self) -> None:
        """Give back memory that was only kept warm, ours and that of peers."""
        self.outgoing.trim()
        self.close()

    def close(self) -> None:
        """Let go of what peers lent; a peer that goes on sending offers it again."""
        self._borrower.close()
        self._paths.clear()
