"""Forwarding of shards to other workers of this host (`shuffle.routing`).

A relay receives a message from another host that has shards for several workers of this host. It
keeps its own shards and forwards the others unchanged: same headers, checksums and buffers. It
answers once all receivers have their shards. `messenger` sends and receives the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_gpurt.errors import ProtocolError
from dask_gpurt.plugins.shuffle.payloads import is_inline
from dask_gpurt.plugins.shuffle.transports import Transport
from dask_gpurt.shuffle import envelope, messages
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.shuffle.shard import Shard
from dask_gpurt.transport import wire

if TYPE_CHECKING:
    from dask_gpurt.plugins.shuffle.messenger import Messenger

Buffers = Sequence[Any]


class Relay:
    """Divides the messages of one run that are for several workers of this host.

    Parameters
    ----------
    transport
        Transport to workers of this host, as in the settings.
    own
        Address of this worker.
    peers
        Other workers of the run.
    outgoing_memory
        Returns memory that peers of this host can read.
    memory_for
        Returns memory for a shard that stays here, given its bytes and its first slot.
    limit_nbytes
        Bytes that a message may announce.
    """

    def __init__(
        self,
        post: Messenger,
        transport: str,
        own: str,
        peers: Collection[str],
        outgoing_memory: Callable[[int], Any],
        memory_for: Callable[[int, int], Any],
        limit_nbytes: int,
    ) -> None:
        self._post = post
        self._transport = transport
        self._own = own
        self._workers = frozenset((own, *peers))
        self._outgoing_memory = outgoing_memory
        self._memory_for = memory_for
        self._limit_nbytes = limit_nbytes

    async def divide(self, header: bytes, payload: Any) -> list[Shard]:
        """Forward the shards of other workers; return the shards for this worker.

        Raises
        ------
        ProtocolError
            The message is malformed, or is for a worker that has no part in the run.
        OSError, DamagedError
            A worker of this host did not get its shards. The sender may send the message again.
        """
        forwards = envelope.decode(header)
        if strangers := {one.target for one in forwards} - self._workers:
            raise ProtocolError(f"shards for {min(strangers)!r}, which has no part in this run")
        headers = [wire.decode(one.header) for one in forwards]
        lengths = messages.buffer_lengths(
            [one for of_target in headers for one in of_target], self._limit_nbytes
        )
        ends = [0, *accumulate(sum(len(one.parts) for one in found) for found in headers)]
        first_slots = {
            first + number: slot
            for one, found, first in zip(forwards, headers, ends, strict=False)
            if one.target == self._own
            for number, slot in enumerate(_first_slots(found))
        }

        def empty(number: int, nbytes: int) -> Any:
            slot = first_slots.get(number)
            return self._outgoing_memory(nbytes) if slot is None else self._memory_for(nbytes, slot)

        buffers = await self._post.fetch(payload, lengths, empty)
        inside = is_inline(payload)
        others: list[tuple[envelope.Forward, Buffers]] = []
        taken: list[Shard] = []
        for one, found, (first, end) in zip(forwards, headers, pairwise(ends), strict=True):
            if one.target == self._own:
                taken += await self._post.opened(found, buffers[first:end], inside=inside)
            else:
                others.append((one, buffers[first:end]))
        passing = (self._pass_on(one, some, inside=inside) for one, some in others)
        # If one fails, wait for the others before the sender gets the error. Peers read from these
        # buffers until then, and the sender may send everything again.
        ended = await asyncio.gather(*passing, return_exceptions=True)
        if failed := [one for one in ended if one is not None]:
            raise failed[0]
        return taken

    async def _pass_on(self, one: envelope.Forward, buffers: Buffers, *, inside: bool) -> None:
        if inside:
            # Peers cannot read the memory of buffers that came inside a control message.
            nbytes = sum(len(buffer) for buffer in buffers)
            buffers = await self._post.in_lane("hand on", nbytes, self._copied, buffers)
        message = Message(one.header, list(buffers))

        async def compose(path: Transport) -> Message:
            return message

        await self._post.deliver(one.target, self._transport, compose)

    def _copied(self, buffers: Buffers) -> Buffers:
        copies = [self._outgoing_memory(len(buffer)) for buffer in buffers]
        for buffer, copy in zip(buffers, copies, strict=True):
            np.copyto(copy, buffer)
        return copies


def _first_slots(headers: Sequence[wire.ShardHeader]) -> list[int]:
    """Return the first slot of the shard that each buffer belongs to."""
    return [header.first_slot for header in headers for _ in header.parts]
