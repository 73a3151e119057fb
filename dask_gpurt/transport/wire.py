"""The header of a shuffle message: which shards follow, and how to read them.

A message is one header and one payload buffer a shard. The header is little-endian throughout,
carries a magic and a version, and every length in it is checked against what is really there
before anything is allocated for it. Layouts are opaque here (`frames` reads them).

::

    offset  size
         0     4  magic "GRT\\x01": the last byte is the version
         4     4  number of layouts            u32
         8     4  number of shards             u32
        12        layouts: length u32, bytes, one after the other
                  shards: fields of `_SHARD`, then rows per slot as u32, one after the other

Bytes in, values out: no socket, no Dask.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dask_gpurt.errors import ProtocolError

MAGIC = b"GRT"
VERSION = 1

_PREAMBLE = struct.Struct("<3sBII")
_LENGTH = struct.Struct("<I")
#: layout, source, attempt, number, count, first slot, slots, buffer, arrow, pickle bytes
_SHARD = struct.Struct("<IIQIIIIQQQ")


@dataclass(frozen=True)
class ShardHeader:
    """What the receiver has to know of one shard before it looks at its bytes.

    Attributes
    ----------
    layout_key
        How to read the payload; opaque to this module.
    source
        Input partition that the rows come from.
    attempt
        Random number of this execution of the transfer task. Two executions of one task can
        cut different shards, so shards of different attempts are never mixed.
    number, count
        This is shard `number` of `count` that this source has for this receiver.
    first_slot
        Slot of the first entry of `rows_per_slot`.
    rows_per_slot
        Rows for each of the consecutive slots.
    buffer_nbytes, arrow_nbytes, pickle_nbytes
        Length of the payload and of its last two sections.
    """

    layout_key: bytes
    source: int
    attempt: int
    number: int
    count: int
    first_slot: int
    rows_per_slot: tuple[int, ...]
    buffer_nbytes: int = 0
    arrow_nbytes: int = 0
    pickle_nbytes: int = 0

    @property
    def n_rows(self) -> int:
        return sum(self.rows_per_slot)


def encode(shards: Sequence[ShardHeader]) -> bytes:
    """Header of a message with these shards, in this order."""
    layouts: dict[bytes, int] = {}
    for shard in shards:
        layouts.setdefault(shard.layout_key, len(layouts))
    chunks = [_PREAMBLE.pack(MAGIC, VERSION, len(layouts), len(shards))]
    for layout in layouts:
        chunks += [_LENGTH.pack(len(layout)), layout]
    for shard in shards:
        chunks.append(
            _SHARD.pack(
                layouts[shard.layout_key],
                shard.source,
                shard.attempt,
                shard.number,
                shard.count,
                shard.first_slot,
                len(shard.rows_per_slot),
                shard.buffer_nbytes,
                shard.arrow_nbytes,
                shard.pickle_nbytes,
            )
        )
        chunks.append(np.array(shard.rows_per_slot, dtype="<u4").tobytes())
    return b"".join(chunks)


def decode(header: bytes) -> list[ShardHeader]:
    """Shards that a header announces.

    Raises
    ------
    ProtocolError
        The bytes are no header, one of another version, cut short, or contradict themselves.
    """
    try:
        return _decode(memoryview(header))
    except struct.error as error:
        raise ProtocolError(f"shuffle message cut short: {error}") from error


def _decode(header: memoryview) -> list[ShardHeader]:
    magic, version, n_layouts, n_shards = _PREAMBLE.unpack_from(header)
    if magic != MAGIC:
        raise ProtocolError("not a shuffle message of dask_gpurt")
    if version != VERSION:
        raise ProtocolError(
            f"shuffle message of version {version}, this worker speaks {VERSION}: "
            "install the same dask-gpurt on every worker"
        )
    position = _PREAMBLE.size
    if n_layouts * _LENGTH.size + n_shards * _SHARD.size > len(header) - position:
        raise ProtocolError("shuffle message announces more than it holds")
    layouts = []
    for _ in range(n_layouts):
        (length,) = _LENGTH.unpack_from(header, position)
        position += _LENGTH.size
        if length > len(header) - position:
            raise ProtocolError("layout longer than its message")
        layouts.append(bytes(header[position : position + length]))
        position += length
    shards = []
    for _ in range(n_shards):
        layout, source, attempt, number, count, first, n_slots, nbytes, arrow, pickle = (
            _SHARD.unpack_from(header, position)
        )
        position += _SHARD.size
        if layout >= n_layouts:
            raise ProtocolError(f"shard of layout {layout} in a message with {n_layouts}")
        if n_slots * 4 > len(header) - position:
            raise ProtocolError("row counts longer than their message")
        if number >= count or arrow + pickle > nbytes:
            raise ProtocolError(f"shard {number} of {count} contradicts itself")
        rows = np.frombuffer(header, dtype="<u4", count=n_slots, offset=position)
        position += n_slots * 4
        shards.append(
            ShardHeader(
                layouts[layout],
                source,
                attempt,
                number,
                count,
                first,
                tuple(rows.tolist()),
                nbytes,
                arrow,
                pickle,
            )
        )
    if position != len(header):
        raise ProtocolError(f"{len(header) - position} bytes too many in a shuffle message")
    return shards
