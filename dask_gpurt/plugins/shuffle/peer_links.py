"""Choice of the transport from this worker to each peer, once per pair, with its reasons.

The sender offers its transports; the receiver tries one, and answers what it can use. An address
alone decides nothing, because it is misleading in containers. In order of preference: memory that
both processes of one host can read (`transport.shared`), UCX endpoints (`transport.ucx`), Dask's
own connections. `arrivals` is the receiving end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dask_gpurt.codecs import nvcomp
from dask_gpurt.devices.host_memory.pages import SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.devices.ledger import Ledger
from dask_gpurt.errors import (
    ConfigError,
    DamagedError,
    LateError,
    ProtocolError,
    TransportError,
)
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.plugins.shuffle.arrivals import LINK_DEADLINE_S, Arrivals
from dask_gpurt.plugins.shuffle.peer_connections import PeerConnections
from dask_gpurt.plugins.shuffle.transports import (
    Call,
    CommTransport,
    HostRefusals,
    SharedTransport,
    Transport,
    UcxTransport,
)
from dask_gpurt.plugins.shuffle.worker_ucx import RefusedError, result_if_any
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.shuffle.routing import host_of
from dask_gpurt.shuffle.traffic import LinkPath, SentTotals, Traffic
from dask_gpurt.transport.host_readings import HostReadings
from dask_gpurt.transport.shared import Lender

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.transport")

T = TypeVar("T")
#: Composes a message for a transport.
Compose = Callable[[Transport], Awaitable[Message]]

#: Answer of a peer that no longer knows an earlier offer.
RELINK = "relink"
#: Answer of a peer that received other bytes than were sent.
DAMAGED = "damaged"
#: A message is sent at most this often if the peer answers with one of these.
_MAX_ATTEMPTS = 3
#: Setting for device data under `auto`: from device memory if possible, else as host data.
DEVICE = "device"


class Links(Arrivals):
    """The transports between one worker and its peers, in both directions. On the event loop.

    Parameters
    ----------
    keep_nbytes
        Limit for idle memory in the pool of outgoing shards.
    ledger
        Gets an entry for each message of a broadcast or a group.
    """

    def __init__(self, worker: Worker, keep_nbytes: int, ledger: Ledger | None = None) -> None:
        super().__init__(worker)
        self.ledger = ledger
        self._worker = worker
        #: Latest value of `gpurt.shuffle.transport` here. Broadcasts and groups use it too.
        self.transport = "auto"
        self.connections = PeerConnections(worker, self._peer_left)
        self._onward: PeerConnections | None = None
        self._paths: dict[tuple[str, str], asyncio.Task[Transport]] = {}
        #: For each transport setting, the peers that are reached through shared memory. Kept as a
        #: set, because every message asks for it and there may be a thousand paths.
        self._on_host: dict[str, set[str]] = {}
        self._lender: Lender | None = None
        self._why_not_shared = ""
        self._refusals = HostRefusals(worker.address)
        #: Why device memory is not sent to a peer, until the next `cool_down`.
        self._device_failures: dict[str, str] = {}
        #: Why `auto` does not use UCX to a peer, until the next `cool_down`.
        self._ucx_failures: dict[str, str] = {}
        #: UCX links that broke, and have delivered nothing since.
        self._broken: dict[str, Transport] = {}
        #: What was sent to peers lately, by the loop's clock.
        self.traffic = Traffic()
        #: All that was sent to peers, for Prometheus.
        self.sent = SentTotals()
        #: Pool of the memory in which outgoing shards are assembled.
        self.outgoing: HostPool
        try:
            memory = SharedPages()
            self._lender = Lender(memory)
        except OSError as error:
            self._why_not_shared = f"no files in memory here ({error.strerror})"
            self.outgoing = HostPool(keep_nbytes)
        else:
            self.outgoing = HostPool(keep_nbytes, source=memory)

    @property
    def onward(self) -> PeerConnections:
        """Connections for messages that this worker hands on for others.

        A sender waits for its relay. If both kinds of messages shared a few connections, relays
        could wait for each other for ever.
        """
        if self._onward is None:
            self._onward = PeerConnections(self._worker)
        return self._onward

    @property
    def _pools(self) -> list[PeerConnections]:
        return [one for one in (self._onward, self.connections) if one is not None]

    # ------------------------------------------------------------------ sending

    async def deliver(self, address: str, transport: str, compose: Compose, call: Call) -> Message:
        """Send a message and wait for the peer's answer; return the message.

        Parameters
        ----------
        transport
            `auto`, `ucx`, `comm` for Dask's own connections alone, or `DEVICE`.
        compose
            Composes the message for the chosen transport.
        call
            Sends a control message to that peer. The buffers may be reused once it answered.

        Raises
        ------
        DamagedError
            Every attempt arrived damaged.
        TransportError
            The peer repeatedly forgot the offer, or cannot be reached.
        ConfigError
            The configured transport is not available.
        """
        for attempt in range(_MAX_ATTEMPTS):
            path = await self._path(address, transport, call)
            message = await compose(path)
            began_s = event_loop(self._worker).time()
            try:
                status = (await path.send(message, call))["status"]
            except TransportError as error:
                # The next attempt finds another path, or says why there is none.
                self._forget(address, transport)
                self._note_error(address, path, message, error)
                raise
            if status == RELINK:
                self._forget(address, transport)
                if attempt and message.is_from_device:
                    self._device_failures[address] = "the peer could not receive"
                elif attempt and path.name == "ucx":
                    self._ucx_failures[address] = "the peer could not receive"
            elif status != DAMAGED:
                self._count_sent(address, path, message, began_s)
                return message
            del message  # an error of the next attempt would keep this frame alive
        if status == RELINK:
            raise TransportError(f"{address} forgets the link at each attempt")
        raise DamagedError(
            f"{_MAX_ATTEMPTS} times in a row a message to {address} arrived damaged: the network "
            "or the memory of one of the two hosts is at fault"
        )

    def _note_error(
        self, address: str, path: Transport, message: Message, error: TransportError
    ) -> None:
        if message.is_from_device:
            # UCX may know a device and still fail to read it.
            self._device_failures[address] = str(error)
        elif path.name == "ucx":
            # One link may break. If its successor breaks too, UCX is at fault.
            broken = self._broken.setdefault(address, path)
            if broken is not path or isinstance(error, LateError):
                self._ucx_failures[address] = str(error)

    def _count_sent(self, address: str, path: Transport, message: Message, began_s: float) -> None:
        self._broken.pop(address, None)
        link = LinkPath(self._worker.address, address, path.name)
        nbytes = sum(buffer.nbytes for buffer in message.buffers)
        now_s = event_loop(self._worker).time()
        self.traffic.add(link, nbytes, now_s)
        self.sent.add(
            path.name,
            is_same_host=host_of(address) == host_of(link.sender),
            nbytes=nbytes,
            seconds=now_s - began_s,
        )

    def on_host(self, transport: str) -> Set[str]:
        """Return the peers whose known path leads through this host's memory."""
        return self._on_host.get(transport, frozenset())

    def known_path(self, address: str, transport: str) -> Transport | None:
        """Return the path to a peer, unless none is known yet."""
        task = self._paths.get((address, transport))
        return result_if_any(task) if task is not None else None

    def _forget(self, address: str, transport: str) -> None:
        self._paths.pop((address, transport), None)
        self._on_host.get(transport, set()).discard(address)

    def _peer_left(self, address: str) -> None:
        """Forget a peer. While shuffles follow each other, `cool_down` never comes."""
        for transport in [transport for peer, transport in self._paths if peer == address]:
            self._forget(address, transport)
        for found in (self._device_failures, self._ucx_failures, self._broken):
            found.pop(address, None)

    def _linked(self, address: str, transport: str, task: asyncio.Task[Transport]) -> None:
        # Always read the error. All waiting callers may be gone, for example because their run
        # ended, and asyncio would log an error that was never read. Do not keep the task: its
        # traceback references the frames of the callers, and so their messages.
        is_failed = task.cancelled() or task.exception() is not None
        if self._paths.get((address, transport)) is not task:
            return
        if is_failed:
            self._forget(address, transport)
        elif task.result().is_local:
            self._on_host.setdefault(transport, set()).add(address)

    async def _path(self, address: str, transport: str, call: Call) -> Transport:
        while True:
            task = self._paths.get((address, transport))
            is_ours = task is None or (
                task.done() and (task.cancelled() or task.exception() is not None)
            )
            if task is None or is_ours:
                task = asyncio.create_task(self._link(address, transport, call))
                self._paths[address, transport] = task
                task.add_done_callback(partial(self._linked, address, transport))
            try:
                # Shielded: other callers may wait for the task too.
                return await asyncio.shield(task)
            except Exception:
                # The offer is a message of one run. If that run has ended, the peer refuses the
                # offer. Callers of other runs, which waited for the same offer, make their own.
                if is_ours:
                    raise

    async def _link(self, address: str, transport: str, call: Call) -> Transport:
        known: dict[str, dict[str, Callable[..., Awaitable[Transport]]]] = {
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
            path = CommTransport(self.connections, address, why_not)
        if not path.is_local:
            path.device_codecs = await _device_codecs_with(call)
        logger.debug("shuffle bytes to %s go by %s %s", address, path.name, path.why_not or "")
        return path

    async def _link_shared(self, address: str, why_not: dict[str, str], call: Call) -> Transport:
        if self._lender is None:
            raise RefusedError(self._why_not_shared)
        await self._refusals.ask(address, partial(_offer, call, "shared", self._lender.descriptor))
        return SharedTransport(self._lender, address, why_not)

    async def _link_ucx(self, address: str, why_not: dict[str, str], call: Call) -> UcxTransport:
        engine = await self.ucx.engine()
        theirs = await _offer(call, "ucx", engine.descriptor)
        peer = await engine.connect(theirs, LINK_DEADLINE_S)
        # Where device memory failed, this path carries copies in host memory.
        both = (
            engine.takes_device_memory
            and bool(theirs.get("takes_device_memory"))
            and address not in self._device_failures
        )
        readings = None
        if not engine.has_fast_network:
            ports = _ports_of(self._worker.address, address)
            readings = HostReadings(str(theirs["host"]), ports)
        return UcxTransport(engine, peer, address, why_not, both, readings)

    async def _link_device(self, address: str, why_not: dict[str, str], call: Call) -> Transport:
        if address in self._device_failures:
            raise RefusedError(f"it failed: {self._device_failures[address]}")
        # Inside a host too: UCX copies from device to device without a copy in host memory.
        path = await self._link_ucx(address, why_not, call)
        if not path.takes_device_memory:
            raise RefusedError("UCX does not know device memory at both ends")
        return path

    # ------------------------------------------------------------------ life

    def report(self) -> dict[str, Any]:
        """Return the path to each peer, for `status`."""
        found = {}
        for (address, _), task in self._paths.items():
            if (path := result_if_any(task)) is not None:
                found[address] = {
                    "path": path.name,
                    "why_not": path.why_not,
                    "bandwidth": path.bandwidth,
                }
        return found

    def bandwidth(self, address: str) -> float:
        """Return the measured bytes a second of the link to a peer; 0 if they are unknown."""
        return float(self.report().get(address, {}).get("bandwidth") or 0.0)

    def lacks(self) -> dict[str, str]:
        """Return the paths this worker does not have at all, with the reasons. Loads no library."""
        why_not = {"shared": self._why_not_shared, "ucx": self.ucx.why_not()}
        return {name: reason for name, reason in why_not.items() if reason}

    def cool_down(self) -> None:
        """Release idle memory: this worker's pool, and the open files of peers."""
        self.outgoing.trim()
        self._drop_links()
        for pool in self._pools:
            pool.rest()

    def _drop_links(self) -> None:
        # A peer that sends again offers its memory again.
        self._borrower.close()
        self._paths.clear()
        self._on_host.clear()
        self._refusals.clear()
        self._device_failures.clear()
        self._ucx_failures.clear()
        self._broken.clear()

    async def disconnect(self) -> None:
        """Drop all links. Shuffles in progress may make new ones."""
        self._drop_links()
        for pool in self._pools:
            if not pool.is_busy:
                await pool.close()
        await self.ucx.close(LINK_DEADLINE_S)

    async def leave_peers(self) -> None:
        """Close all connections: the worker closes."""
        for pool in self._pools:
            await pool.close(for_good=True)

    def close(self) -> None:
        """Free the outgoing pool: the worker is closed, and no peer reads from it any more."""
        self.outgoing.close()


async def _offer(call: Call, name: str, offer: Any) -> Any:
    """Offer a transport to the peer; return the peer's part of it."""
    answer = await call({"offers": {name: offer}})
    if answer["why_not"] is not None:
        raise RefusedError(answer["why_not"])
    return answer["ours"]


async def _device_codecs_with(call: Call) -> Set[int]:
    """Return the numbers of the device codecs that both this worker and a peer have."""
    ours = (await asyncio.to_thread(nvcomp.usable)).keys()
    if not ours:
        return frozenset()
    try:
        theirs = await _offer(call, "codecs", None)
    except RefusedError:
        return frozenset()  # a peer of an earlier version, without this question
    if not isinstance(theirs, (list, tuple)):
        raise ProtocolError(f"codecs {theirs!r}")
    return frozenset(number for number in ours if number in theirs)


def _ports_of(*addresses: str) -> set[int]:
    """Return the ports of worker addresses; in-process addresses have none."""
    ports = (address.rpartition(":")[2] for address in addresses)
    return {int(port) for port in ports if port.isdigit()}
