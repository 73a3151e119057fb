"""Encoding of shards into messages, and decoding of received messages into shards.

Shards travel unencoded between processes of one host, and out of device memory. Any other shard
gets a checksum, and is encoded where that pays (`codecs`). Encoding, decoding and checksums touch
every byte, so callers run them in threads. `transport.wire` has the binary format of the header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import (
    Encoded,
    decode_shard,
    pack_table,
    unencoded,
    unpack_table,
)
from dask_gpurt.codecs.nvcomp import NVCOMP_CODECS
from dask_gpurt.errors import DamagedError, ProtocolError
from dask_gpurt.frames.adapter import Packed
from dask_gpurt.shuffle import envelope
from dask_gpurt.shuffle.envelope import Forward
from dask_gpurt.shuffle.shard import Origins, Shard
from dask_gpurt.transport import wire

Buffer = npt.NDArray[np.uint8]
#: Encodes a shard.
Encode = Callable[["Outgoing"], Encoded]
_CODECS = {**HOST_CODECS, **NVCOMP_CODECS}

#: A message inside a host may be `_TIMES` times as large as one to another host. The messages to
#: all peers of the host share `_TIMES_FOR_ALL` times that size, but each has at least that size.
_TIMES = 4
_TIMES_FOR_ALL = 8
#: Messages of shards in device memory are at most this many times larger.
_DEVICE_TIMES = 32
#: All messages to peers together take at most this part of the device memory for shards.
_DEVICE_SHARE = 1 / 8


@dataclass(frozen=True)
class Outgoing:
    """A packed shard and its header.

    Attributes
    ----------
    target
        Worker that the shard is for, if a relay gets it (`shuffle.routing`).
    """

    header: wire.ShardHeader
    packed: Packed
    target: str | None = None

    @property
    def nbytes(self) -> int:
        return int(self.packed.buffer.nbytes)


@dataclass(frozen=True)
class Message:
    """A header and its buffers.

    Attributes
    ----------
    raw_nbytes
        Bytes of the shards before encoding, if they leave this host.
    wire_nbytes
        Bytes of header and buffers that leave this host.
    """

    header: bytes
    buffers: list[Buffer]
    raw_nbytes: int = 0
    wire_nbytes: int = 0

    @property
    def is_from_device(self) -> bool:
        """Whether any buffer is in device memory."""
        return not all(isinstance(buffer, np.ndarray) for buffer in self.buffers)


def local_message(shards: Iterable[Outgoing]) -> Message:
    """Return a message that stays on this host: no checksum, no encoding."""
    return _message((shard, 0, Encoded((shard.packed.buffer,), ())) for shard in shards)


def remote_message(shards: Sequence[Outgoing], encode: Encode) -> Message:
    """Return a message that leaves this host: with checksums, encoded where `encode` does so."""

    def sealed(shard: Outgoing) -> tuple[Outgoing, int, Encoded]:
        buffer = shard.packed.buffer
        if shard.packed.is_on_device:
            return shard, 0, Encoded((buffer,), ())
        encoded = encode(shard)
        return shard, wire.checksum(unencoded(buffer, encoded.table)), encoded

    message = _message(map(sealed, shards))
    wire_nbytes = len(message.header) + sum(buffer.nbytes for buffer in message.buffers)
    raw_nbytes = sum(shard.nbytes for shard in shards)
    return replace(message, raw_nbytes=raw_nbytes, wire_nbytes=wire_nbytes)


def enveloped(of_target: Mapping[str, Message]) -> Message:
    """Return one message for a relay, made of messages for other workers of its host."""
    found = of_target.values()
    header = envelope.encode([Forward(target, one.header) for target, one in of_target.items()])
    more_nbytes = len(header) - sum(len(one.header) for one in found)
    return Message(
        header,
        [buffer for one in found for buffer in one.buffers],
        raw_nbytes=sum(one.raw_nbytes for one in found),
        wire_nbytes=sum(one.wire_nbytes for one in found) + more_nbytes,
    )


def local_message_nbytes(message_nbytes: int, n_peers: int) -> int:
    """Return the size at which a message inside this host is closed.

    Such a message carries only the places of its shards in memory. A larger one costs hardly more
    than a small one, so it may be several times `message_nbytes`. But its receiver allocates memory
    for the whole message before the budget for shards counts it, for all peers at once. So messages
    get smaller as the number of peers on the host grows.

    Parameters
    ----------
    message_nbytes
        Size at which messages that carry their shards are closed.
    n_peers
        Number of peers on this host; at least one.
    """
    return message_nbytes * min(_TIMES, max(1, _TIMES_FOR_ALL // n_peers))


def device_message_nbytes(message_nbytes: int, n_peers: int, budget_nbytes: int) -> int:
    """Return the size at which a message of shards in device memory is closed.

    A message costs its two ends about a millisecond, and devices copy hundreds of MB in that time.
    Shards that wait for a peer take as much again.

    Parameters
    ----------
    message_nbytes
        Size at which messages from host memory are closed.
    n_peers
        Number of peers; at least one.
    budget_nbytes
        Device memory for shards.
    """
    share_nbytes = int(_DEVICE_SHARE * budget_nbytes) // n_peers
    return max(message_nbytes, min(_DEVICE_TIMES * message_nbytes, share_nbytes))


def _message(shards: Iterable[tuple[Outgoing, int, Encoded]]) -> Message:
    headers = []
    buffers: list[Buffer] = []
    for shard, checksum, encoded in shards:
        headers.append(
            replace(
                shard.header,
                buffer_nbytes=shard.packed.buffer.nbytes,
                arrow_nbytes=shard.packed.arrow_nbytes,
                pickle_nbytes=shard.packed.pickle_nbytes,
                checksum=checksum,
                parts=tuple(part.nbytes for part in encoded.parts),
                table=pack_table(encoded.table),
            )
        )
        buffers += encoded.parts
    return Message(wire.encode(headers), buffers)


def buffer_lengths(headers: Iterable[wire.ShardHeader], limit_nbytes: int) -> list[int]:
    """Return the lengths of the buffers that belong to these headers.

    Raises
    ------
    ProtocolError
        The decoded shards would not fit into this worker's memory.
    """
    headers = list(headers)
    announced = sum(header.buffer_nbytes for header in headers)
    if announced > limit_nbytes:
        raise ProtocolError(f"shards of {announced} bytes for a worker that has {limit_nbytes}")
    return [nbytes for header in headers for nbytes in header.parts]


def decode_shards(
    headers: Sequence[wire.ShardHeader],
    buffers: Sequence[Buffer],
    empty: Callable[[wire.ShardHeader], Buffer],
    *,
    in_place: bool = True,
) -> list[Shard]:
    """Return the shards in the buffers received for these headers.

    Parameters
    ----------
    empty
        Allocates memory for a shard that must be decoded or copied.
    in_place
        Leave an unencoded shard in its buffer. Otherwise copy it into memory from `empty`.

    Raises
    ------
    DamagedError
        A checksum does not match.
    ProtocolError
        A shard has an unknown encoding, or does not match its header.
    """
    shards = []
    position = 0
    for header in headers:
        parts = buffers[position : position + len(header.parts)]
        position += len(parts)
        table = unpack_table(header.table)
        if table:
            buffer = empty(header)
            decode_shard(parts, table, buffer, _CODECS)
        elif in_place:
            (buffer,) = parts
        else:
            # Copy out of the message's memory into the pool: a warm copy. The pages of this shard
            # are then freed together with those of neighbouring shards, and can hold outputs.
            buffer = empty(header)
            np.copyto(buffer, parts[0])
        if header.checksum and wire.checksum(unencoded(buffer, table)) != header.checksum:
            raise DamagedError(f"a shard of input partition {header.source} was damaged on its way")
        packed = Packed(buffer, header.n_rows, header.arrow_nbytes, header.pickle_nbytes)
        shards.append(shard_of(header, packed=packed))
    return shards


def shard_of(header: wire.ShardHeader, **contents: Any) -> Shard:
    """Return the shard that a header describes.

    Raises
    ------
    ProtocolError
        The header contradicts itself.
    """
    origins = header.origins()
    return Shard(
        # Only shards of one task have this source, so it serves as the name of their batch.
        origins=Origins(*origins, header.source) if origins is not None else None,
        rows_per_slot=header.rows_per_slot,
        source=header.source,
        attempt=header.attempt,
        number=header.number,
        count=header.count,
        first_slot=header.first_slot,
        layout_key=header.layout_key,
        **contents,
    )
