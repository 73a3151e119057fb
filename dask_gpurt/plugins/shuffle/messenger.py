"""Carries the shards of one run to their receivers, and takes in what comes.

Stands between `exchange_run`, which knows the run's life, and `transport_choice`, which knows the
ways. Here is what a message of this run is made of on each of them, and what a peer's answer means
for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import dask.config
import numpy as np
from dask.utils import parse_timedelta

from dask_gpurt.codecs.encoded_shards import Encoded, joined
from dask_gpurt.config import ShuffleSettings
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.ledger import COMMUNICATION, WAITING
from dask_gpurt.frames.adapter import BodyAdapter, DeviceMemory, Landing, on_host
from dask_gpurt.plugins.patches.connections import let_go_of_message
from dask_gpurt.plugins.patches.p2p import (
    P2PConsistencyError,
    ShuffleClosedError,
    clean_exception,
    context_meter,
    retry,
)
from dask_gpurt.plugins.shuffle.transport_choice import DEVICE, came_inside
from dask_gpurt.plugins.shuffle.transports import Path
from dask_gpurt.plugins.worker import RunLike, state_of
from dask_gpurt.shuffle import messages
from dask_gpurt.shuffle.messages import Message, Outgoing
from dask_gpurt.shuffle.shards import Shard
from dask_gpurt.transport import wire
from dask_gpurt.transport.ucx_protocol import LEAST_DEVICE_NBYTES

if TYPE_CHECKING:
    from distributed import Worker

T = TypeVar("T")

#: What is done with a message that came.
_TAKING_IN = frozenset(("landing", "borrow", "decode"))


class Courier:
    """Of one run, on one worker. On the event loop; what touches every byte is in a lane.

    Parameters
    ----------
    adapter
        Says where in a shard bytes of one kind lie.
    """

    def __init__(
        self,
        run: RunLike,
        worker: Worker,
        settings: ShuffleSettings,
        adapter: BodyAdapter,
    ) -> None:
        self._run = run
        self._worker = worker
        self._settings = settings
        self._adapter = adapter
        self._state = state_of(worker)
        retry_key = "distributed.p2p.comm.retry"
        self._retry = {
            "count": dask.config.get(f"{retry_key}.count"),
            "delay_min": parse_timedelta(dask.config.get(f"{retry_key}.delay.min")),
            "delay_max": parse_timedelta(dask.config.get(f"{retry_key}.delay.max")),
        }

    async def send(self, address: str, shards: Sequence[Outgoing]) -> Message:
        """Deliver shards to a peer; returns what was sent once the peer has it.

        Raises
        ------
        ShuffleClosedError
            The run is over.
        OSError
            The peer could not be reached, however often it was tried.
        Exception
            Whatever the peer raised.
        """

        run = self._run
        on_device = any(shard.packed.is_on_device for shard in shards)
        nbytes = sum(shard.nbytes for shard in shards)

        async def compose(path: Path) -> Message:
            found = shards
            if on_device:
                found = await self._in_lane("to host", nbytes, self._staged, path, shards)
            if path.is_local:
                return messages.as_they_are(found)
            with context_meter.meter("compress"):
                encode = partial(self._encode, path)
                return await self._in_lane("encode", nbytes, messages.for_the_wire, found, encode)

        async def call(data: dict[str, Any]) -> dict[str, Any]:
            run.raise_if_closed()
            try:
                answer: dict[str, Any] = await self._worker.rpc(address).shuffle_receive(
                    data=data, shuffle_id=run.id, run_id=run.run_id
                )
            except OSError as unsent:
                let_go_of_message(unsent)
                raise
            if answer["status"] == "error":
                _, error, traceback = clean_exception(**answer)
                assert error is not None
                if isinstance(error, ShuffleClosedError):
                    # The peer is on its way out and the scheduler has yet to notice, which will
                    # end this run. Until then it is no more than a peer that cannot be reached.
                    raise OSError(f"{address} is closing") from error
                if isinstance(error, P2PConsistencyError):
                    raise ShuffleClosedError(f"{run} is over") from error
                raise error.with_traceback(traceback)
            return answer

        transport = self._settings.transport
        if transport == "auto" and on_device:
            transport = DEVICE
        deliver = partial(self._state.links.deliver, address, transport, compose, call)
        message: Message = await retry(
            deliver, operation=f"message to {address} of {self._run}", **self._retry
        )
        return message

    async def take_in(self, header: bytes, payload: Any) -> list[Shard]:
        """Shards of a message that came, in memory of this worker.

        Raises
        ------
        DamagedError
            The message is not what was sent.
        TransportError
            The sender has to offer its path again.
        ProtocolError
            It never was a message.
        """
        run = self._run
        headers = wire.decode(header)
        lengths = messages.checked(headers, self._state.memory_nbytes)
        # One buffer of a message is one shard, unless it is encoded.
        of_part = [header for header in headers for _ in header.parts]
        landed: dict[int, DeviceMemory] = {}
        landing = self._adapter.landing
        if landing is not None and self._state.links.lands(payload):
            # What has a checksum, or is encoded, is looked at in the host's memory first.
            wanted = {
                number: nbytes
                for number, (header, nbytes) in enumerate(zip(of_part, lengths, strict=True))
                if nbytes >= LEAST_DEVICE_NBYTES and not header.table and not header.checksum
            }
            if wanted:
                nbytes = sum(wanted.values())
                landed = await self._in_lane("landing", nbytes, _landed, landing, wanted)

        def empty(number: int, nbytes: int) -> Any:
            header = of_part[number]
            if header.table:
                return np.empty(nbytes, dtype=np.uint8)
            if number in landed:
                return landed.pop(number)
            return run.memory_for(nbytes, header.first_slot)

        def empty_shard(header: wire.ShardHeader) -> Any:
            return run.memory_for(header.buffer_nbytes, header.first_slot)

        async def beside(nbytes: int, read: Callable[[], None]) -> None:
            await self._in_lane("borrow", nbytes, read)

        buffers = await self._state.links.fetch(payload, lengths, empty, beside)
        inside = came_inside(payload)
        opened = partial(messages.opened, headers, buffers, empty_shard, in_place=not inside)
        # Decoding, copying and checking touch every byte: while the loop did that, it would start
        # no task and read no other message.
        if inside or any(header.table or header.checksum for header in headers):
            nbytes = sum(header.buffer_nbytes for header in headers)
            return await self._in_lane("decode", nbytes, opened)
        return opened()

    def _staged(self, path: Path, shards: Sequence[Outgoing]) -> list[Outgoing]:
        """Shards with those copied to the host that do not leave from the device on this path."""
        compression = self._settings.compression
        # On a link of TCP, whose bandwidth is known, UCX has them copied to the host as well; there
        # it can be seen whether a codec pays.
        is_taken = path.takes_device_memory and (
            compression == "none" or (compression == "auto" and path.bandwidth is None)
        )
        return [
            shard
            if is_taken and shard.nbytes >= LEAST_DEVICE_NBYTES
            else replace(shard, packed=on_host(shard.packed, self._run.outgoing_memory))
            for shard in shards
        ]

    def _encode(self, path: Path, shard: Outgoing) -> Encoded:
        key, packed = shard.header.layout_key, shard.packed
        link, bandwidth = path.address, path.bandwidth
        chooser = self._state.chooser(self._settings.compression, path.device_codecs)
        if not chooser.may_pay(key, packed.buffer.nbytes, link, bandwidth):
            return Encoded((packed.buffer,), ())
        sections = joined(self._adapter.sections(key, packed))
        return chooser.encode(key, sections, packed.buffer, link, bandwidth)

    async def _in_lane(
        self, path: str, nbytes: int, function: Callable[..., T], *arguments: Any
    ) -> T:
        # A message that was on its way when the run ended: its worker may have no lanes any more.
        self._run.raise_if_closed()
        # What a peer waits for goes first: until it is taken in, the peer is held back.
        priority = Priority.HIGH if path in _TAKING_IN else Priority.NORMAL
        job = self._state.lanes.codec.submit(
            function, *arguments, priority=priority, path=path, nbytes=nbytes
        )
        with self._state.ledger.timed(COMMUNICATION, WAITING):
            return await asyncio.wrap_future(job)


def _landed(landing: Landing, wanted: Mapping[int, int]) -> dict[int, DeviceMemory]:
    """Memory of the device for buffers of these numbers and lengths, as far as it has room."""
    found = {}
    for number, nbytes in wanted.items():
        memory = landing(nbytes)
        if memory is None:
            break
        found[number] = memory
    return found
