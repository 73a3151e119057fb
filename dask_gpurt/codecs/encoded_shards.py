"""Encoding of a whole shard, section by section, with a table that describes the result.

The table and the parts are sent. Raw bytes are views of the shard's buffer, unless they are few.
Adjacent raw bytes are one entry. A shard without encoded sections needs no table: its buffer is its
only part. The table describes the parts completely, so a receiver needs neither the frame's layout
nor the sender's decisions::

    entry   size
        0      1  codec, 0 for raw     u8
        1      1  item size            u8
        2      8  raw bytes            u64
       10      8  bytes of the parts   u64

Numbers are little-endian. Entries follow each other in the order of the buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_gpurt.codecs.codec import RAW, Bytes, Codec, Section
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.errors import ProtocolError

_ENTRY = struct.Struct("<BBQQ")
ENTRY_NBYTES = _ENTRY.size

#: Shorter sections are joined with neighbours of the same item size. A call costs about 10 us,
#: which a kilobyte of one column among a thousand never earns back.
_JOINED_NBYTES = 16 * 2**10

#: Fewer raw bytes are copied next to their encoded neighbours: a further buffer on the wire costs
#: more than the copy.
_VIEWED_NBYTES = 4 * 2**10

#: Sections that are shorter even after joining are not encoded.
LEAST_NBYTES = 1024


@dataclass(frozen=True)
class SectionEntry:
    """The encoding of one range of a shard."""

    codec: int
    itemsize: int
    raw_nbytes: int
    wire_nbytes: int


@dataclass(frozen=True)
class Encoded:
    """An encoded shard.

    Attributes
    ----------
    parts
        Buffers in order. Long raw ranges are views of the shard.
    table
        Description of the parts; empty if the only part is the shard itself.
    """

    parts: tuple[Bytes, ...]
    table: tuple[SectionEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, including the table."""
        return sum(part.nbytes for part in self.parts) + ENTRY_NBYTES * len(self.table)


def joined(sections: Iterable[tuple[str, int, int, int]]) -> list[Section]:
    """Join short sections of one item size, so that each result is worth a call.

    The number of joined sections is a power of two. So shards of similar length are joined alike,
    and measurements of one apply to the next.
    """
    result: list[Section] = []
    run: list[Section] = []

    def close() -> None:
        if run:
            name = run[0].name if len(run) == 1 else f"{run[0].name}..{run[-1].name}"
            nbytes = sum(one.nbytes for one in run)
            result.append(Section(name, run[0].offset, nbytes, run[0].itemsize))
            run.clear()

    wanted = 1
    for section in map(Section._make, sections):
        if run and (len(run) >= wanted or section.itemsize != run[0].itemsize):
            close()
        # Padding inside a section would misalign the items after it.
        if run and run[-1].nbytes % run[-1].itemsize:
            close()
        if not run:
            wanted = 1
            while wanted * section.nbytes < _JOINED_NBYTES and section.nbytes:
                wanted *= 2
        run.append(section)
    close()
    return result


def encode_shard(
    buffer: Bytes,
    sections: Sequence[Section],
    choices: Sequence[int],
    codecs: Mapping[int, Codec] = HOST_CODECS,
) -> Encoded:
    """Encode each section with the codec chosen for it.

    Parameters
    ----------
    buffer
        A packed shard. It must not change while the result is in use.
    sections
        Sections in order, covering the buffer.
    choices
        Codec number of each section, or `RAW`. A section stays raw if encoding does not shrink it
        by more than its table entries.

    Raises
    ------
    ValueError
        The sections do not cover the buffer.
    """
    table: list[SectionEntry] = []
    parts: list[Bytes] = []
    pieces: list[Bytes] = []
    position = raw_from = 0

    def close_raw(end: int) -> None:
        if nbytes := end - raw_from:
            table.append(SectionEntry(RAW, 1, nbytes, nbytes))
            if nbytes >= _VIEWED_NBYTES:
                _flush(pieces, parts)
            target = pieces if nbytes < _VIEWED_NBYTES else parts
            target.append(buffer[raw_from:end])

    for section, choice in zip(sections, choices, strict=True):
        if section.offset != position:
            raise ValueError(f"section {section.name!r} begins at {section.offset}, not {position}")
        end = position + section.nbytes
        encoded = None
        if choice != RAW:
            encoded = codecs[choice].encode(buffer[position:end], section.itemsize)
        # An encoded section may split raw bytes in two, so it costs two entries.
        wire_nbytes = sum(piece.nbytes for piece in encoded) if encoded is not None else 0
        if encoded is not None and wire_nbytes + 2 * ENTRY_NBYTES < section.nbytes:
            close_raw(position)
            table.append(SectionEntry(choice, section.itemsize, section.nbytes, wire_nbytes))
            pieces += encoded
            raw_from = end
        position = end
    if position != buffer.nbytes:
        raise ValueError(f"sections cover {position} of {buffer.nbytes} bytes")
    if not table:
        return Encoded((buffer,), ())
    close_raw(position)
    _flush(pieces, parts)
    # The first raw bytes cost an entry that no section has saved.
    wire_nbytes = sum(part.nbytes for part in parts) + len(table) * ENTRY_NBYTES
    if wire_nbytes >= buffer.nbytes:
        return Encoded((buffer,), ())
    return Encoded(tuple(parts), tuple(table))


def _flush(pieces: list[Bytes], parts: list[Bytes]) -> None:
    """Append the pieces to the parts as one buffer, and clear them."""
    if pieces:
        parts.append(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        pieces.clear()


def decode_shard(
    parts: Iterable[Any],
    table: Sequence[SectionEntry],
    out: Bytes,
    codecs: Mapping[int, Codec] = HOST_CODECS,
) -> None:
    """Decode a shard into `out`.

    Parameters
    ----------
    parts
        Received buffers: those of `Encoded`, or fewer and longer ones. An entry never spans two of
        them.
    table
        The received table.
    out
        Memory of exactly the shard's length. Its content is undefined after an error.

    Raises
    ------
    ProtocolError
        Parts, table and `out` do not match, or bytes are damaged.
    """
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in parts if len(part)]
    if not table and out.nbytes:
        table = [SectionEntry(RAW, 1, out.nbytes, out.nbytes)]
    _require_lengths(table, out.nbytes, sum(array.nbytes for array in arrays))
    arrays.reverse()
    current = np.empty(0, dtype=np.uint8)
    position = 0
    for entry in table:
        if not current.nbytes and arrays:
            current = arrays.pop()
        if entry.wire_nbytes > current.nbytes:
            raise ProtocolError("an encoded section goes across two buffers")
        payload, current = current[: entry.wire_nbytes], current[entry.wire_nbytes :]
        target = out[position : position + entry.raw_nbytes]
        position += entry.raw_nbytes
        if entry.codec == RAW:
            if entry.wire_nbytes != entry.raw_nbytes:
                raise ProtocolError("raw bytes of another length than announced")
            np.copyto(target, payload)
            continue
        codec = codecs.get(entry.codec)
        if codec is None:
            raise ProtocolError(f"unknown codec {entry.codec}")
        codec.decode_into(payload, target, entry.itemsize)


def _require_lengths(table: Sequence[SectionEntry], raw_nbytes: int, wire_nbytes: int) -> None:
    if sum(entry.raw_nbytes for entry in table) != raw_nbytes:
        raise ProtocolError(f"the table of a shard does not describe its {raw_nbytes} bytes")
    if sum(entry.wire_nbytes for entry in table) != wire_nbytes:
        raise ProtocolError(f"the table of a shard does not describe {wire_nbytes} bytes that came")


def unencoded(buffer: Bytes, table: Sequence[SectionEntry]) -> list[Bytes]:
    """Return the raw parts of a shard. Codecs detect damage of the other parts themselves.

    Parameters
    ----------
    buffer
        The packed shard.
    table
        The table of `Encoded`.
    """
    if not table:
        return [buffer]
    found = []
    position = 0
    for entry in table:
        if entry.codec == RAW:
            found.append(buffer[position : position + entry.raw_nbytes])
        position += entry.raw_nbytes
    return found


def pack_table(table: Iterable[SectionEntry]) -> bytes:
    """Encode the table."""
    return b"".join(_ENTRY.pack(e.codec, e.itemsize, e.raw_nbytes, e.wire_nbytes) for e in table)


def unpack_table(packed: Any) -> tuple[SectionEntry, ...]:
    """Decode the table. `decode_shard` checks the lengths.

    Raises
    ------
    ProtocolError
        The bytes are not a whole number of entries.
    """
    if len(packed) % ENTRY_NBYTES:
        raise ProtocolError("the table of a shard is cut short")
    return tuple(SectionEntry(*fields) for fields in _ENTRY.iter_unpack(packed))
