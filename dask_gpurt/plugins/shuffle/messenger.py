"""Sending and receiving of one run's messages, between the run and the transports.

`exchange_run` owns the life of the run, and `peer_links` picks the transport to a peer. This
module composes a message for the chosen transport, and interprets the peer's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import dask.config
import numpy as np
from dask.utils import parse_timedelta

from dask_gpurt.codecs.encoded_shards import Encoded, joined
from dask_gpurt.config import ShuffleSettings
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.ledger import COMMUNICATION, WAITING
from dask_gpurt.frames.adapter import ArrivalAllocator, BodyAdapter, DeviceMemory, on_host
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.memory.gpu_budget import shards_limit_nbytes
from dask_gpurt.plugins.patches.connections import drop_message
from dask_gpurt.plugins.patches.p2p import (
    P2PConsistencyError,
    P2POutOfDiskError,
    Reschedule,
    ShuffleClosedError,
    clean_exception,
    context_meter,
    event_loop,
    retry,
)
from dask_gpurt.plugins.shuffle.payloads import is_inline
from dask_gpurt.plugins.shuffle.peer_links import DEVICE, Compose
from dask_gpurt.plugins.shuffle.relay import Relay
from dask_gpurt.plugins.shuffle.transports import Transport
from dask_gpurt.plugins.tracing.ledger_hook import entered, message_numbers
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle import credits, messages
from dask_gpurt.shuffle.envelope import is_envelope
from dask_gpurt.shuffle.messages import Message, Outgoing
from dask_gpurt.shuffle.shard import Shard
from dask_gpurt.tracing.lane_names import RELAY, SEND
from dask_gpurt.transport import wire
from dask_gpurt.transport.ucx.protocol import LEAST_DEVICE_NBYTES

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun

T = TypeVar("T")

#: Lane jobs that process a received message.
_TAKING_IN = frozenset(("allocate", "borrow", "decode"))


class Messenger:
    """Sender and receiver of one run's messages on one worker. On the event loop; byte work runs in
    lanes.

    Parameters
    ----------
    adapter
        Returns the sections of a shard, and the function that allocates device memory.
    peers
        Other workers that own partitions of the run.
    n_hops
        Number of workers that this one sends to: its peers, or relays for them.
    """

    def __init__(
        self,
        run: ExchangeRun,
        worker: Worker,
        settings: ShuffleSettings,
        adapter: BodyAdapter,
        peers: Collection[str],
        n_hops: int,
    ) -> None:
        self._run = run
        self._worker = worker
        self._settings = settings
        self._adapter = adapter
        self._runtime = runtime_of(worker)
        self._n_peers = len(peers)
        self._most_messages = credits.most_messages(n_hops)
        #: Last credit of each peer. Before a peer's first answer, `_first_credit_nbytes` counts.
        #: That is the credit that this worker would give.
        self._credits: dict[str, int] = {}
        self._first_credit_nbytes = credits.part_nbytes(self._runtime.memory_nbytes, len(peers))
        self._relay = Relay(
            self,
            settings.transport,
            worker.address,
            peers,
            run.outgoing_memory,
            run.memory_for,
            self._runtime.memory_nbytes,
        )
        #: Size of messages from device memory; 0 until the run sends a shard from there.
        self._device_message_nbytes = 0
        retry_key = "distributed.p2p.comm.retry"
        self._retry = {
            "count": dask.config.get(f"{retry_key}.count"),
            "delay_min": parse_timedelta(dask.config.get(f"{retry_key}.delay.min")),
            "delay_max": parse_timedelta(dask.config.get(f"{retry_key}.delay.max")),
        }

    async def send(self, address: str, shards: Sequence[Outgoing]) -> Message:
        """Deliver shards to a peer; return the message once the peer has it.

        Raises
        ------
        ShuffleClosedError
            The run is over.
        OSError
            All retries failed to reach the peer.
        Exception
            The peer raised it.
        """

        on_device = any(shard.packed.is_on_device for shard in shards)
        nbytes = sum(shard.nbytes for shard in shards)

        async def compose(path: Transport) -> Message:
            found = shards
            if on_device:
                found = await self.in_lane("to host", nbytes, self._staged, path, shards)
            if path.is_local:
                return _for_targets(address, found, messages.local_message)
            with context_meter.meter("compress"):
                encode = partial(self._encode, path)

                def remote(group: Sequence[Outgoing]) -> Message:
                    return messages.remote_message(group, encode)

                return await self.in_lane("encode", nbytes, _for_targets, address, found, remote)

        transport = self._device_transport if on_device else self._settings.transport
        message = await self.deliver(address, transport, compose, SEND, nbytes)
        self._runtime.counters.add(sent_nbytes=nbytes, messages=1)
        return message

    async def send_around(self, relay: str, shards: Sequence[Outgoing]) -> Message:
        """Deliver shards to their targets directly, because their relay cannot be reached."""
        return messages.enveloped(
            {
                target: await self.send(target, [replace(shard, target=None) for shard in group])
                for target, group in _by_target(relay, shards).items()
            }
        )

    async def deliver(
        self,
        address: str,
        transport: str,
        compose: Compose,
        path: str = RELAY,
        nbytes: int | None = None,
    ) -> Message:
        """Send a message and wait for the peer's answer; return the message. Raises as `send`.

        The ledger gets an entry with `path` and `nbytes`. The peer's entry has the same message
        number.
        """
        run, number = self._run, next(message_numbers)
        links = self._runtime.links
        connections = links.onward if path == RELAY else links.connections

        async def call(data: dict[str, Any]) -> dict[str, Any]:
            if run.closed:
                raise ShuffleClosedError(f"{run} is over")
            try:
                answer = await connections.receive(
                    address,
                    data={**data, "sender": self._worker.address, "message": number},
                    shuffle_id=run.id,
                    run_id=run.run_id,
                )
            except OSError as unsent:
                drop_message(unsent)
                raise
            if answer["status"] == "error":
                self._raise_error_of(answer, address)
            if "header" in data and answer["status"] == "OK":
                self._credits[address] = credits.checked(answer.get("credit"))
            return answer

        async def with_retries(composing: Compose) -> Message:
            deliver = partial(links.deliver, address, transport, composing, call)
            message: Message = await retry(
                deliver, operation=f"message to {address} of {run}", **self._retry
            )
            return message

        return await entered(
            self._runtime.ledger,
            with_retries,
            compose,
            address,
            path,
            nbytes=nbytes,
            run=run.run_id,
            message=number,
        )

    def _raise_error_of(self, answer: dict[str, Any], address: str) -> NoReturn:
        """Raise the error with which a peer has answered a message."""
        run = self._run
        _, error, traceback = clean_exception(**answer)
        assert error is not None
        if isinstance(error, ShuffleClosedError):
            # The peer is closing, and the scheduler will notice and end this run. Until then, treat
            # it as a peer that cannot be reached.
            raise OSError(f"{address} is closing") from error
        if isinstance(error, P2POutOfDiskError):
            # An error of the system, which `retry` would take for a lost connection.
            run.give_up(error)
        if isinstance(error, (P2PConsistencyError, P2POutOfDiskError, Reschedule)):
            raise ShuffleClosedError(f"{run} is over") from error
        raise error.with_traceback(traceback)

    @property
    def _device_transport(self) -> str:
        transport = self._settings.transport
        return DEVICE if transport == "auto" else transport

    def expect_device_shards(self) -> None:
        """Note that this run sends shards from device memory, in larger messages."""
        if not self._device_message_nbytes:
            self._device_message_nbytes = messages.device_message_nbytes(
                self._settings.message_nbytes, self._n_peers, shards_limit_nbytes()
            )
            # A peer gets room for two messages.
            most_nbytes = credits.N_MESSAGES * self._n_peers * self._device_message_nbytes
            budget = self._runtime.send_budget(self._settings)
            owner = self._run.id, self._run.run_id
            budget.want(owner, most_nbytes)
            # `close` may have withdrawn the room of this run before the call above.
            if self._run.closed:
                budget.forget(owner)

    def message_nbytes(self, address: str) -> int:
        """Return the size at which a message to a peer is closed."""
        return self._pace(address)[0]

    def n_messages(self, address: str) -> int:
        """Return the messages that may be in flight to a peer."""
        return min(self._pace(address)[1], self._most_messages)

    def _pace(self, address: str) -> tuple[int, int]:
        settings, links = self._settings, self._runtime.links
        if self._device_message_nbytes:
            path = links.known_path(address, self._device_transport)
            if path is not None and self._takes_device_memory(path):
                return self._device_message_nbytes, credits.N_MESSAGES
        nbytes, peers = settings.message_nbytes, links.on_host(settings.transport)
        if address in peers:
            nbytes = messages.local_message_nbytes(nbytes, len(peers))
        return credits.pace(nbytes, self._credits.get(address, self._first_credit_nbytes))

    def heard_from(self, sender: Any, number: Any) -> None:
        """Note that a message of this peer begins to arrive.

        Raises
        ------
        ProtocolError
            `sender` is no address, or `number` is no message number.
        """
        request_checks.message(sender, number)
        run = self._run
        key = sender, run.id, run.run_id
        self._runtime.senders.note(key, event_loop(self._worker).time())

    def credit_nbytes(self) -> int:
        """Return the bytes that each sender may have under way to this worker."""
        return self._runtime.senders.credit_nbytes(self._n_peers)

    def _takes_device_memory(self, path: Transport) -> bool:
        compression = self._settings.compression
        # Only TCP links have a known bandwidth. There, UCX copies device memory to the host anyway,
        # and a copy that is made here can also be encoded.
        return path.takes_device_memory and (
            compression == "none" or (compression == "auto" and path.bandwidth is None)
        )

    async def receive(self, header: bytes, payload: Any) -> list[Shard]:
        """Return the shards of a received message, in memory of this worker.

        Raises
        ------
        DamagedError
            A checksum does not match.
        TransportError
            The sender must offer its path again.
        ProtocolError
            The message is malformed.
        """
        if is_envelope(header):
            return await self._relay.divide(header, payload)
        run = self._run
        headers = wire.decode(header)
        lengths = messages.buffer_lengths(headers, self._runtime.memory_nbytes)
        # The header of each buffer. A shard has one buffer, or several if it is encoded.
        of_part = [header for header in headers for _ in header.parts]
        on_device: dict[int, DeviceMemory] = {}
        allocate_device = self._adapter.allocate_device
        if allocate_device is not None and self._runtime.links.reaches_device(payload):
            # Shards with a checksum or an encoding are processed in host memory first.
            wanted = {
                number: nbytes
                for number, (header, nbytes) in enumerate(zip(of_part, lengths, strict=True))
                if nbytes >= LEAST_DEVICE_NBYTES and not header.table and not header.checksum
            }
            if wanted:
                nbytes = sum(wanted.values())
                on_device = await self.in_lane(
                    "allocate", nbytes, _allocated, allocate_device, wanted
                )

        def empty(number: int, nbytes: int) -> Any:
            header = of_part[number]
            if header.table:
                return np.empty(nbytes, dtype=np.uint8)
            if number in on_device:
                return on_device.pop(number)
            return run.memory_for(nbytes, header.first_slot)

        buffers = await self.fetch(payload, lengths, empty)
        return await self.opened(headers, buffers, inside=is_inline(payload))

    async def fetch(
        self, payload: Any, lengths: Sequence[int], empty: Callable[[int, int], Any]
    ) -> list[Any]:
        """Bring the payload of a message to this worker. See `Links.fetch`."""
        in_thread = partial(self.in_lane, "borrow", sum(lengths))
        return await self._runtime.links.fetch(payload, lengths, empty, in_thread)

    async def opened(
        self, headers: Sequence[wire.ShardHeader], buffers: Sequence[Any], *, inside: bool
    ) -> list[Shard]:
        """Return the shards in received buffers.

        Parameters
        ----------
        inside
            Whether the buffers are inside the message.
        """

        def empty_shard(header: wire.ShardHeader) -> Any:
            return self._run.memory_for(header.buffer_nbytes, header.first_slot)

        opened = partial(messages.decode_shards, headers, buffers, empty_shard, in_place=not inside)
        # Decoding, copying and checking touch every byte. On the event loop, this would delay the
        # start of tasks and other messages.
        if inside or any(header.table or header.checksum for header in headers):
            nbytes = sum(header.buffer_nbytes for header in headers)
            return await self.in_lane("decode", nbytes, opened)
        return opened()

    def _staged(self, path: Transport, shards: Sequence[Outgoing]) -> list[Outgoing]:
        """Copy shards in device memory to the host, unless this path sends them from the device."""
        is_taken = self._takes_device_memory(path)
        return [
            shard
            if is_taken and shard.nbytes >= LEAST_DEVICE_NBYTES
            else replace(shard, packed=on_host(shard.packed, self._run.outgoing_memory))
            for shard in shards
        ]

    def _encode(self, path: Transport, shard: Outgoing) -> Encoded:
        key, packed = shard.header.layout_key, shard.packed
        link, bandwidth = path.address, path.bandwidth
        chooser = self._runtime.chooser(self._settings.compression, path.device_codecs)
        if not chooser.may_pay(key, packed.buffer.nbytes, link, bandwidth):
            return Encoded((packed.buffer,), ())
        sections = joined(self._adapter.sections(key, packed))
        return chooser.encode(key, sections, packed.buffer, link, bandwidth)

    async def in_lane(
        self, path: str, nbytes: int, function: Callable[..., T], *arguments: Any
    ) -> T:
        # A message may arrive after its run ended, when its worker may have no lanes any more.
        self._run.raise_if_closed()
        # Received messages go first: their senders wait for the answer.
        priority = Priority.HIGH if path in _TAKING_IN else Priority.NORMAL
        job = self._runtime.lanes.codec.submit(
            function, *arguments, priority=priority, path=path, nbytes=nbytes
        )
        with self._runtime.ledger.timed(COMMUNICATION, WAITING):
            return await asyncio.wrap_future(job)


def _by_target(address: str, shards: Sequence[Outgoing]) -> dict[str, list[Outgoing]]:
    """Return the shards in a message to a peer, by the worker that they are for."""
    found: dict[str, list[Outgoing]] = {}
    for shard in shards:
        found.setdefault(shard.target or address, []).append(shard)
    return found


def _for_targets(
    address: str,
    shards: Sequence[Outgoing],
    compose: Callable[[Sequence[Outgoing]], Message],
) -> Message:
    """Return a message to a peer; an envelope if any of the shards is for another worker."""
    of_target = _by_target(address, shards)
    if of_target.keys() <= {address}:
        return compose(shards)
    return messages.enveloped({target: compose(found) for target, found in of_target.items()})


def _allocated(
    allocate_device: ArrivalAllocator, wanted: Mapping[int, int]
) -> dict[int, DeviceMemory]:
    """Allocate device memory for buffers of these numbers and lengths, as far as there is room."""
    return dict(zip(wanted, allocate_device(list(wanted.values())), strict=False))
