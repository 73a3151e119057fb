"""The header of a message that a relay divides among the workers of its host.

It holds complete headers (`transport.wire`), each with the address of its receiver. Their buffers
follow one another in the payload. So a relay hands on headers and buffers as they came, checksums
included. The binary format is little-endian::

    offset  size
         0     4  magic "GRE\\x01": the last byte is the version
         4     4  CRC-32 of everything after it        u32
         8     4  number of headers                    u32
        12        headers: length of the address u16, of the header u32; address; header

Bytes in, values out: no socket, no Dask.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from dask_gpurt.errors import DamagedError, ProtocolError

_MAGIC = b"GRE\x01"
_SEALED = struct.Struct("<4sI")
_COUNT = struct.Struct("<I")
_LENGTHS = struct.Struct("<HI")


class Forward(NamedTuple):
    """A header, and the address of the worker that it is for."""

    target: str
    header: bytes


def encode(forwards: Sequence[Forward]) -> bytes:
    """Return the header of a message to a relay, which contains these headers."""
    chunks = [_COUNT.pack(len(forwards))]
    for target, header in forwards:
        address = target.encode()
        chunks += [_LENGTHS.pack(len(address), len(header)), address, header]
    sealed = b"".join(chunks)
    return _SEALED.pack(_MAGIC, zlib.crc32(sealed)) + sealed


def is_envelope(header: bytes) -> bool:
    """Return whether a header is an envelope, which a relay divides."""
    return bytes(header[: len(_MAGIC)]) == _MAGIC


def decode(header: bytes) -> list[Forward]:
    """Return the headers inside, in the order of their buffers.

    Raises
    ------
    ProtocolError
        The bytes are no envelope, or are cut short or inconsistent.
    DamagedError
        The checksum does not match.
    """
    view = memoryview(header)
    if not is_envelope(header) or len(view) < _SEALED.size + _COUNT.size:
        raise ProtocolError("not a dask_gpurt message for a relay")
    _, seal = _SEALED.unpack_from(view)
    if zlib.crc32(view[_SEALED.size :]) != seal:
        raise DamagedError("the header of a message for a relay was damaged on its way")
    (n_headers,) = _COUNT.unpack_from(view, _SEALED.size)
    position = _SEALED.size + _COUNT.size
    found = []
    for _ in range(n_headers):
        if len(view) - position < _LENGTHS.size:
            raise ProtocolError("a message for a relay is cut short")
        n_address, n_header = _LENGTHS.unpack_from(view, position)
        position += _LENGTHS.size
        if n_address + n_header > len(view) - position:
            raise ProtocolError("a message for a relay is cut short")
        try:
            target = bytes(view[position : position + n_address]).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("a message for a relay names no address") from error
        position += n_address
        found.append(Forward(target, bytes(view[position : position + n_header])))
        position += n_header
    if position != len(view):
        raise ProtocolError(f"{len(view) - position} bytes too many in a message for a relay")
    return found
