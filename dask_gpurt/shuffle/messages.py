"""Messages of shards: what a sender makes of its shards, and a receiver of what came.

Between processes of one host shards travel as they are, and so do those that are sent out of the
memory of a device. Anywhere else each gets a checksum and is encoded where that pays (`codecs`).
Bytes in, values out; called in threads, since it touches every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from dask_gpurt.shuffle.shards import Shard
from dask_gpurt.transport import wire

Buffer = npt.NDArray[np.uint8]
#: Shard to what travels for it.
Encode = Callable[["Outgoing"], Encoded]
_CODECS = {**HOST_CODECS, **NVCOMP_CODECS}

#: Messages inside a host are so many times as large as others, and so many times for all peers
#: together, as long as they are not smaller than others.
_TIMES = 4
_TIMES_FOR_ALL = 8


@dataclass(frozen=True)
class Outgoing:
    """A packed shard and its header."""

    header: wire.ShardHeader
    packed: Packed

    @property
    def nbytes(self) -> int:
        return int(self.packed.buffer.nbytes)


@dataclass(frozen=True)
class Message:
    """A header, and the buffers that go with it.

    Attributes
    ----------
    raw_nbytes
        Bytes of the shards, if they leave this host, before they were encoded.
    wire_nbytes
        Bytes of header and buffers that leave this host.
    """

    header: bytes
    buffers: list[Buffer]
    raw_nbytes: int = 0
    wire_nbytes: int = 0

    @property
    def is_from_device(self) -> bool:
        """Whether any of it leaves out of the memory of a device."""
        return not all(isinstance(buffer, np.ndarray) for buffer in self.buffers)


def as_they_are(shards: Iterable[Outgoing]) -> Message:
    """A message that stays on this host: nothing is looked at."""
    return _message((shard, 0, Encoded((shard.packed.buffer,), ())) for shard in shards)


def for_the_wire(shards: Sequence[Outgoing], encode: Encode) -> Message:
    """A message that leaves this host: with checksums, and encoded where `encode` does it."""

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


def nbytes_on_host(message_nbytes: int, n_peers: int) -> int:
    """Size at which a message is closed that says where in memory its shards are.

    A larger one costs hardly more than a small one, so it may be several times `message_nbytes`.
    But its receiver has to find memory for all of it before it is counted among shards, and for
    those of all peers at once; so the more peers there are on the host, the smaller they are.

    Parameters
    ----------
    message_nbytes
        Size at which messages that carry their shards are closed.
    n_peers
        Workers of this host that are sent to, and send as much; at least one.
    """
    return message_nbytes * min(_TIMES, max(1, _TIMES_FOR_ALL // n_peers))


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


def checked(headers: Iterable[wire.ShardHeader], limit_nbytes: int) -> list[int]:
    """Lengths of the buffers that belong to these headers.

    Raises
    ------
    ProtocolError
        The shards would not fit into this worker's memory, whatever they are encoded as.
    """
    headers = list(headers)
    announced = sum(header.buffer_nbytes for header in headers)
    if announced > limit_nbytes:
        raise ProtocolError(f"shards of {announced} bytes for a worker that has {limit_nbytes}")
    return [nbytes for header in headers for nbytes in header.parts]


def opened(
    headers: Sequence[wire.ShardHeader],
    buffers: Sequence[Buffer],
    empty: Callable[[wire.ShardHeader], Buffer],
    *,
    in_place: bool = True,
) -> list[Shard]:
    """Shards out of the buffers that came for their headers.

    Parameters
    ----------
    empty
        Memory for a shard that has to be decoded or copied.
    in_place
        A shard that came as it is stays in its buffer; otherwise it is copied out of it.

    Raises
    ------
    DamagedError
        A shard is not what was sent.
    ProtocolError
        A shard is encoded in a way that is not known here, or does not fit its header.
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
            # Out of the message's memory and into the pool's: a warm copy, after which the pages
            # of this shard come free together with its neighbours in time, and serve as outputs.
            buffer = empty(header)
            np.copyto(buffer, parts[0])
        if header.checksum and wire.checksum(unencoded(buffer, table)) != header.checksum:
            raise DamagedError(f"a shard of input partition {header.source} was damaged on its way")
        packed = Packed(buffer, header.n_rows, header.arrow_nbytes, header.pickle_nbytes)
        shards.append(shard_of(header, packed=packed))
    return shards


def shard_of(header: wire.ShardHeader, **contents: Any) -> Shard:
    """The shard that a header announces."""
    return Shard.with_rows(
        header.rows_per_slot,
        source=header.source,
        attempt=header.attempt,
        number=header.number,
        count=header.count,
        first_slot=header.first_slot,
        layout_key=header.layout_key,
        **contents,
    )
