"""The format of a file that holds one flattened value. Pure: no I/O.

A file consists of a *lead* and *blocks*. The lead has all small parts: the value's header, its
small buffers, and a table of where each buffer is. Each large buffer is a block, which begins on a
4 KiB boundary. So it can be read past the page cache into memory of its own, which is freed
independently of other buffers. The lead is written last: a file without a valid lead, or with the
lead of another file, holds no value.

::

    offset  size
         0     4  magic "GRV\\x02": the last byte is the version
         4     4  CRC-32 of the lead after it              u32, little-endian as all below
         8     8  bytes of the lead                        u64
        16     8  bytes of the file                        u64
        24     8  identity: a number that no other file has  u64
        32     4  number of buffers                        u32
        36     4  bytes of the value's header              u32
        40        one entry for each buffer (`_ENTRY`): offset u64, bytes in the file u64,
                  bytes of the buffer u64, checksum of the bytes in the file u32
                  (`codecs.checksums`; 0 for those in the lead), coder u32 (0: uncompressed)
                  the value's header
                  small buffers, each on a 64-byte boundary
                  blocks, each on a 4 KiB boundary
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = b"GRV"
VERSION = 2
#: Alignment of blocks, in files and in memory.
BLOCK_NBYTES = 4096
#: Smallest buffer that becomes a block. Otherwise each of a hundred thousand short vectors would
#: take whole pages, in the file and in memory.
SMALL_NBYTES = 64 << 10

#: Coders of a block, by number. A number is never reused for another coder.
CODERS = ("none", "lz4", "zstd")

_PREAMBLE = struct.Struct("<3sBIQQQII")
_SEALED_FROM = 8
_ENTRY = struct.Struct("<QQQII")
_ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]


class BufferEntry(NamedTuple):
    """The position of one buffer.

    Attributes
    ----------
    offset
        Offset in the file.
    stored_nbytes, nbytes
        Length in the file, and length once decoded.
    checksum
        Checksum of the bytes in the file; 0 for buffers in the lead, which has a checksum itself.
    coder
        Number in `CODERS`.
    """

    offset: int
    stored_nbytes: int
    nbytes: int
    checksum: int
    coder: int

    def is_in(self, lead_nbytes: int) -> bool:
        return self.offset < lead_nbytes or not self.stored_nbytes


@dataclass(frozen=True)
class FileLayout:
    """The positions of all parts of one value.

    Attributes
    ----------
    lead_nbytes
        Length of the lead.
    offsets
        Offset of each buffer.
    blocks
        Numbers of the buffers that are blocks.
    nbytes
        Length of the file: whole blocks, or that of the lead if there are no blocks.
    """

    lead_nbytes: int
    offsets: tuple[int, ...]
    blocks: tuple[int, ...]
    nbytes: int


def padded(nbytes: int, to: int = BLOCK_NBYTES) -> int:
    return -(-nbytes // to) * to


def layout_of(header_nbytes: int, stored_nbytes: Sequence[int]) -> FileLayout:
    """Return the layout of a value whose buffers take `stored_nbytes` in the file."""
    end = _PREAMBLE.size + len(stored_nbytes) * _ENTRY.size + header_nbytes
    offsets = [0] * len(stored_nbytes)
    blocks = []
    for number, nbytes in enumerate(stored_nbytes):
        if nbytes >= SMALL_NBYTES:
            blocks.append(number)
        else:
            offsets[number] = padded(end, _ALIGNMENT)
            end = offsets[number] + nbytes
    if not blocks:
        return FileLayout(end, tuple(offsets), (), end)
    lead_nbytes = end = padded(end)
    for number in blocks:
        offsets[number] = end
        end += padded(stored_nbytes[number])
    return FileLayout(lead_nbytes, tuple(offsets), tuple(blocks), end)


def write_lead(
    out: Bytes,
    layout: FileLayout,
    identity: int,
    header: bytes,
    stored: Sequence[Bytes],
    entries: Sequence[BufferEntry],
) -> None:
    """Fill the memory of a lead.

    Parameters
    ----------
    identity
        Number that the reader has to expect. A disk that lost a write returns the previous bytes,
        which may be another value of the same layout.
    stored
        All buffers as they are stored; blocks are ignored.
    """
    out[:] = 0
    position = _PREAMBLE.size
    for entry in entries:
        _ENTRY.pack_into(out.data, position, *entry)
        position += _ENTRY.size
    out[position : position + len(header)] = np.frombuffer(header, np.uint8)
    blocks = set(layout.blocks)
    for number, (data, entry) in enumerate(zip(stored, entries, strict=True)):
        if number not in blocks:
            out[entry.offset : entry.offset + data.nbytes] = data
    fields = (layout.lead_nbytes, layout.nbytes, identity, len(entries), len(header))
    _PREAMBLE.pack_into(out.data, 0, MAGIC, VERSION, 0, *fields)
    seal = zlib.crc32(out[_SEALED_FROM:].data)
    _PREAMBLE.pack_into(out.data, 0, MAGIC, VERSION, seal, *fields)


def read_lead(lead: Bytes, file_nbytes: int, identity: int) -> tuple[bytes, list[BufferEntry]]:
    """Return the value's header, and the entries of its buffers.

    Raises
    ------
    ValueError
        This is not the lead of this file.
    """
    if lead.nbytes < _PREAMBLE.size:
        raise ValueError("it is cut short")
    magic, version, seal, *fields = _PREAMBLE.unpack_from(lead.data)
    if magic != MAGIC or version != VERSION:
        raise ValueError("it was not written to its end")
    *expected, n_buffers, header_nbytes = fields
    if zlib.crc32(lead[_SEALED_FROM:].data) != seal:
        raise ValueError("its lead is damaged")
    if expected != [lead.nbytes, file_nbytes, identity]:
        raise ValueError("it is another file")
    first = _PREAMBLE.size + n_buffers * _ENTRY.size
    if first + header_nbytes > lead.nbytes:
        raise ValueError("its lead contradicts itself")
    entries = [
        BufferEntry(*fields) for fields in _ENTRY.iter_unpack(lead[_PREAMBLE.size : first].data)
    ]
    return lead[first : first + header_nbytes].tobytes(), entries
