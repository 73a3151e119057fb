"""Which path shuffle bytes take from this worker to each peer: chosen once a pair, and why.

The sender offers what it has, the receiver tries, and answers what it can use; nothing is concluded
from addresses, which lie in containers. Paths in the order in which they are preferred: memory
that both processes of one host can read (`transport.shared`), UCX endpoints of our own
(`transport.ucx`), Dask's own connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from dask_gpurt.codecs import nvcomp
from dask_gpurt.devices.host_memory.pages import SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.errors import (
    ConfigError,
    DamagedError,
    LateError,
    ProtocolError,
    TransportError,
)
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.plugins.shuffle.transports import (
    MESSAGE_DEADLINE_S,
    Call,
    CommPath,
    Path,
    SharedPath,
    UcxPath,
)
from dask_gpurt.plugins.shuffle.worker_ucx import RefusedError, WorkerUcx, result_if_any
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport.host_readings import HostReadings
from dask_gpurt.transport.shared import Borrower, Lender, seal

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.transport")

T = TypeVar("T")
Buffer = npt.NDArray[np.uint8]
#: Makes a call that moves so many bytes, in a thread.
Beside = Callable[[int, Callable[[], None]], Awaitable[None]]
#: Makes a message for a path.
Compose = Callable[[Path], Awaitable[Message]]

#: Answer of a peer that no longer knows what an earlier offer was about.
RELINK = "relink"
#: ... and of one that got something else than what was sent.
DAMAGED = "damaged"
#: So often is a message sent that is answered with one of these.
_MAX_ATTEMPTS = 3
#: Transport of data of devices where any will do: through a device's memory if that can be, and as
#: data of the host otherwise.
DEVICE = "device"
#: Messages from a peer's memory that are smaller are read on the loop: that takes less than to have
#: it done beside it, which is 60 to 110 us. Warm memory is copied at 10 to 20 GB/s.
LEAST_BESIDE_NBYTES = 1 << 20
#: How long a new link over UCX, or the end of all of them, may take.
_LINK_DEADLINE_S = 10.0


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
        self.ucx = WorkerUcx(worker)
        self._no_memory = ""
        #: Why device memory is not sent to a peer until the next cool-down.
        self._device_failures: dict[str, str] = {}
        #: Why `auto` does not take UCX to a peer until then.
        self._ucx_failures: dict[str, str] = {}
        #: Links over UCX that broke, after which nothing was delivered yet.
        self._broken: dict[str, Path] = {}
        #: Where shards that leave are put together.
        self.outgoing = HostPool(keep_nbytes)
        try:
            memory = SharedPages()
            self._lender = Lender(memory)
            self.outgoing = HostPool(keep_nbytes, source=memory)
        except OSError as error:
            self._no_memory = f"no files in memory here ({error.strerror})"

    # ------------------------------------------------------------------ sending

    async def deliver(self, address: str, transport: str, compose: Compose, call: Call) -> Message:
        """Send a message and wait for the peer's answer; returns what was sent.

        Parameters
        ----------
        transport
            `auto`, `ucx`, `comm` for Dask's own connections alone, or `DEVICE`.
        compose
            Makes the message for the path that was chosen.
        call
            Sends a message to that peer. Its buffers may be reused once it answered.

        Raises
        ------
        DamagedError
            The message was damaged on its way, over and over again.
        TransportError
            The peer forgets over and over again what it was offered, or cannot be reached.
        ConfigError
            The transport that was asked for is not to be had.
        """
        for attempt in range(_MAX_ATTEMPTS):
            path = await self._path(address, transport, call)
            message = await compose(path)
            try:
                answer = await path.carry(message, call)
            except TransportError as error:
                # The next attempt finds another way, or says why there is none.
                self._forget(address, transport)
                if message.is_from_device:
                    # UCX may know a device and not get along with it.
                    self._device_failures[address] = str(error)
                elif path.name == "ucx":
                    # A link may break. If the next one does as well, there is more to it.
                    broken = self._broken.setdefault(address, path)
                    if broken is not path or isinstance(error, LateError):
                        self._ucx_failures[address] = str(error)
                raise
            status = answer["status"]
            if status == RELINK:
                self._forget(address, transport)
                if attempt and message.is_from_device:
                    self._device_failures[address] = "the peer could not receive"
                elif attempt and path.name == "ucx":
                    self._ucx_failures[address] = "the peer could not receive"
            elif status != DAMAGED:
                self._broken.pop(address, None)
                return message
            del message  # an error of the next attempt keeps this frame
        if status == RELINK:
            raise TransportError(f"{address} does not keep a link")
        raise DamagedError(
            f"{_MAX_ATTEMPTS} times in a row a message to {address} arrived damaged: the network "
            "or the memory of one of the two hosts is at fault"
        )

    def on_host(self, transport: str) -> set[str]:
        """Peers to which the path is known, and leads through this host's memory."""
        return {
            address
            for (address, used), task in self._paths.items()
            if used == transport and (path := result_if_any(task)) is not None and path.is_local
        }

    def _forget(self, address: str, transport: str) -> None:
        self._paths.pop((address, transport), None)

    def _forget_failed(self, address: str, transport: str, task: asyncio.Task[Path]) -> None:
        # The error is read in any case: whoever waits for it may go, as a run does that ends, and
        # then nobody would see why it failed, which asyncio takes for a mistake. It is not kept:
        # its traceback has the frames of those who waited, and so the messages that they had.
        is_failed = task.cancelled() or task.exception() is not None
        if is_failed and self._paths.get((address, transport)) is task:
            self._forget(address, transport)

    async def _path(self, address: str, transport: str, call: Call) -> Path:
        while True:
            task = self._paths.get((address, transport))
            is_ours = task is None or (
                task.done() and (task.cancelled() or task.exception() is not None)
            )
            if task is None or is_ours:
                task = asyncio.create_task(self._link(address, transport, call))
                self._paths[address, transport] = task
                task.add_done_callback(partial(self._forget_failed, address, transport))
            try:
                # Others may be waiting for it too.
                return await asyncio.shield(task)
            except Exception:
                # Whoever asks the peer does so for one run. If that run ends meanwhile, the peer
                # refuses, which says nothing to those who waited along for another run.
                if is_ours:
                    raise

    async def _link(self, address: str, transport: str, call: Call) -> Path:
        known: dict[str, dict[str, Callable[..., Awaitable[Path]]]] = {
            "auto": {"shared": self._link_shared, "ucx": self._link_ucx},
            DEVICE: {
                "device": self._link_device,
                "shared": self._link_shared,
                "ucx": self._link_ucx,
            },
            "ucx": {"ucx": self._link_ucx},
            "comm": {},
        }
        why_not: dict[str, str] = {}
        for name, link in known[transport].items():
            try:
                if transport != "ucx" and name != "shared" and address in self._ucx_failures:
                    raise RefusedError(f"it failed: {self._ucx_failures[address]}")
                path = await link(address, why_not, call)
                break
            except TransportError as error:
                if transport == "ucx" and not isinstance(error, RefusedError):
                    raise  # it may work the next time
                why_not[name] = str(error)
        else:
            if transport == "ucx":
                raise ConfigError(
                    f"gpurt.shuffle.transport is ucx, but {address} cannot be reached that way: "
                    f"{why_not['ucx']}"
                )
            path = CommPath(self._worker, address, why_not)
        if not path.is_local:
            path.device_codecs = await _device_codecs_with(call)
        logger.debug("shuffle bytes to %s go by %s %s", address, path.name, path.why_not or "")
        return path

    async def _link_shared(self, address: str, why_not: dict[str, str], call: Call) -> Path:
        if self._lender is None:
            raise RefusedError(self._no_memory)
        await _accepted(call, "shared", self._lender.descriptor)
        return SharedPath(self._lender, address, why_not)

    async def _link_ucx(self, address: str, why_not: dict[str, str], call: Call) -> UcxPath:
        engine = await self.ucx.engine()
        theirs = await _accepted(call, "ucx", engine.descriptor)
        peer = await engine.connect(theirs, _LINK_DEADLINE_S)
        # Where a device's memory failed, this is the way of copies in the host's.
        both = (
            engine.takes_device_memory
            and bool(theirs.get("takes_device_memory"))
            and address not in self._device_failures
        )
        readings = None
        if not engine.has_fast_network:
            ports = _ports_of(self._worker.address, address)
            readings = HostReadings(str(theirs["host"]), ports)
        return UcxPath(engine, peer, address, why_not, both, readings)

    async def _link_device(self, address: str, why_not: dict[str, str], call: Call) -> Path:
        if address in self._device_failures:
            raise RefusedError(f"it failed: {self._device_failures[address]}")
        # Inside a host too: from one device to another there is a shorter way than by the host.
        path = await self._link_ucx(address, why_not, call)
        if not path.takes_device_memory:
            raise RefusedError("UCX does not know device memory at both ends")
        return path

    # ------------------------------------------------------------------ receiving

    async def accept(self, offers: Mapping[str, Any]) -> dict[str, Any]:
        """Answer to a peer that wants to send, and can do so in this way.

        Raises
        ------
        ProtocolError
            That is no offer.
        """
        if not isinstance(offers, Mapping) or len(offers) != 1:
            raise ProtocolError("an offer of a path names one path")
        ((name, offer),) = offers.items()
        try:
            ours: Any = None
            if name == "shared":
                self._borrower.open(offer)
            elif name == "ucx":
                engine = await self.ucx.engine()
                known = {"takes_device_memory": engine.takes_device_memory}
                token = offer.get("token") if isinstance(offer, Mapping) else None
                ours = {**await engine.invite(token, _LINK_DEADLINE_S), **known}
            elif name == "codecs":
                ours = sorted(await asyncio.to_thread(nvcomp.usable))
            else:
                raise RefusedError(f"no path of that name: {name!r}")
            return {"status": "OK", "ours": ours, "why_not": None}
        except TransportError as error:
            return {"status": "OK", "ours": None, "why_not": str(error)}

    def lands(self, payload: Any) -> bool:
        """Whether the payload of a message can be written to the memory of a device."""
        if not isinstance(payload, Mapping) or payload["by"] != "ucx":
            return False
        engine = self.ucx.started
        return engine is not None and engine.takes_device_memory

    async def fetch(
        self,
        payload: Any,
        lengths: Sequence[int],
        empty: Callable[[int, int], Buffer],
        beside: Beside,
    ) -> list[Buffer]:
        """Bring the payload of a message to this worker.

        Parameters
        ----------
        lengths
            Bytes of each buffer, as announced. Checked before anything is allocated.
        empty
            Number of a buffer and its length to the memory for it, of a device if the payload can
            be written there. Called on the loop.
        beside
            Has a peer's memory read beside the loop.

        Returns
        -------
        The buffers, in memory from `empty`. What came inside the message itself is still there: to
        copy it is work for a thread.

        Raises
        ------
        TransportError
            The sender has to offer its path again.
        DamagedError
            The payload is not what was sent.
        ProtocolError
            The payload is not what was announced.
        """
        if came_inside(payload):
            return [_viewed(part, nbytes) for part, nbytes in _pairs(payload, lengths)]
        if payload["by"] == "shared":
            if seal(payload["token"], payload["places"]) != payload["seal"]:
                raise DamagedError("places in shared memory were damaged on their way")
            return await self._borrow(payload["token"], payload["places"], lengths, empty, beside)
        if payload["by"] != "ucx" or self.ucx.started is None:
            raise TransportError("a path that was not offered")
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
        beside: Beside,
    ) -> list[Buffer]:
        fetched, sent, lent = [], [], []
        for number, (part, nbytes) in enumerate(_pairs(parts, lengths)):
            # All of it is checked before any of it is read.
            if isinstance(part, bytes):
                source = _viewed(part, nbytes)
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

        # The sender keeps what it lent until this message is answered. If it gives the message up,
        # what is read here may be anything, and is of no use either: it has sent the shards once
        # more and had an answer, so that these are the second of their kind, or its run is over.
        if (nbytes := sum(lengths)) < LEAST_BESIDE_NBYTES:
            read()
        else:
            await beside(nbytes, read)
        return fetched

    # ------------------------------------------------------------------ life

    def report(self) -> dict[str, Any]:
        """Path to each peer, for `status`."""
        found = {}
        for (address, _), task in self._paths.items():
            if (path := result_if_any(task)) is not None:
                found[address] = {
                    "path": path.name,
                    "why_not": path.why_not,
                    "bandwidth": path.bandwidth,
                }
        return found

    def lacks(self) -> dict[str, str]:
        """Paths that this worker does not have, whatever its peers have, and why. Loads nothing."""
        why_not = {"shared": self._no_memory, "ucx": self.ucx.why_not()}
        return {name: reason for name, reason in why_not.items() if reason}

    def ucx_report(self) -> dict[str, Any] | None:
        """What the engine for UCX says of itself; None where none was wanted so far."""
        engine = self.ucx.started
        return None if engine is None else engine.report()

    def cool_down(self) -> None:
        """Give back memory that was only kept warm, ours and that of peers."""
        self.outgoing.trim()
        self._let_go()

    def _let_go(self) -> None:
        # A peer that goes on sending offers it again.
        self._borrower.close()
        self._paths.clear()
        self._device_failures.clear()
        self._ucx_failures.clear()
        self._broken.clear()

    async def close(self) -> None:
        """Let go of all links. Shuffles that are under way may make others."""
        self._let_go()
        await self.ucx.close(_LINK_DEADLINE_S)

    def end(self) -> None:
        """The worker is closed, and no peer reads from it any more."""
        self.outgoing.close()


async def _accepted(call: Call, name: str, offer: Any) -> Any:
    """What the peer has for its part, if it takes the offer."""
    answer = await call({"offers": {name: offer}})
    if answer["why_not"] is not None:
        raise RefusedError(answer["why_not"])
    return answer["ours"]


async def _device_codecs_with(call: Call) -> Set[int]:
    """Numbers of codecs of devices that this worker and a peer have."""
    ours = (await asyncio.to_thread(nvcomp.usable)).keys()
    if not ours:
        return frozenset()
    try:
        theirs = await _accepted(call, "codecs", None)
    except RefusedError:
        return frozenset()  # it does not know the question
    if not isinstance(theirs, (list, tuple)):
        raise ProtocolError(f"codecs {theirs!r}")
    return frozenset(number for number in ours if number in theirs)


def _pairs(parts: Sequence[Any], lengths: Sequence[int]) -> list[tuple[Any, int]]:
    if len(parts) != len(lengths):
        raise ProtocolError(f"{len(parts)} buffers came of {len(lengths)}")
    return list(zip(parts, lengths, strict=True))


def _viewed(part: Any, nbytes: int) -> Buffer:
    found = np.frombuffer(part, dtype=np.uint8)
    if found.nbytes != nbytes:
        raise ProtocolError(f"{found.nbytes} bytes came of {nbytes}")
    return found


def came_inside(payload: Any) -> bool:
    """Whether a payload came with its message, and not beside it."""
    return not isinstance(payload, Mapping)


def _ports_of(*addresses: str) -> set[int]:
    """Where workers listen; those inside one process do at no port."""
    ports = (address.rpartition(":")[2] for address in addresses)
    return {int(port) for port in ports if port.isdigit()}
