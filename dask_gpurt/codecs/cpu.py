"""Codecs that run on a CPU: a transform, followed by an entropy coder.

A payload is a CRC-32 of 4 bytes, the parameters of the transform, the bytes after the last whole
item, and the encoded rest. The CRC covers all of these, and the codec, item size and length to
decode to. It detects damaged bytes, which LZ4 and the transforms do not, and wrong lengths, which
pyarrow's decoders do not. A CRC over encoded bytes costs less than one over raw bytes. It does not
defend against attackers. The worst that such a peer can do is to leave bytes of its own shard
undefined.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_gpurt.codecs import narrowing, planes
from dask_gpurt.codecs.codec import Bytes, Codec
from dask_gpurt.codecs.coders import compress, decompress, takes
from dask_gpurt.errors import DamagedError, ProtocolError

_CRC = struct.Struct("<I")
#: codec, item size, raw bytes
_MEANT = struct.Struct("<BBQ")


def _crc(codec: int, raw_nbytes: int, itemsize: int, pieces: Iterable[Bytes]) -> int:
    crc = zlib.crc32(_MEANT.pack(codec, itemsize, raw_nbytes))
    for piece in pieces:
        crc = zlib.crc32(piece.data, crc)
    return crc


def sealed(codec: int, raw_nbytes: int, itemsize: int, pieces: list[Bytes]) -> list[Bytes] | None:
    """Return a payload of a CRC and these pieces; None if it is not smaller than the raw bytes."""
    if _CRC.size + sum(piece.nbytes for piece in pieces) >= raw_nbytes:
        return None
    crc = np.frombuffer(_CRC.pack(_crc(codec, raw_nbytes, itemsize, pieces)), dtype=np.uint8)
    return [crc, *(piece for piece in pieces if piece.nbytes)]


def opened(codec: int, name: str, payload: Any, raw_nbytes: int, itemsize: int) -> Bytes:
    """Check the CRC of a payload and return the bytes behind it.

    Raises
    ------
    DamagedError
        The payload is damaged, or belongs to another codec, length or item size.
    ProtocolError
        The payload is cut short.
    """
    if len(payload) < _CRC.size:
        raise ProtocolError("an encoded section is cut short")
    rest = np.frombuffer(payload, dtype=np.uint8)
    (expected,) = _CRC.unpack(rest[: _CRC.size].tobytes())
    rest = rest[_CRC.size :]
    if _crc(codec, raw_nbytes, itemsize, (rest,)) != expected:
        raise DamagedError(f"a section encoded with {name} was damaged on its way")
    return rest


@dataclass(frozen=True)
class HostCodec:
    """A codec of one transform and one coder.

    Attributes
    ----------
    transform
        `plain`, `shuffle` (byte planes) or `narrow` (`codecs.narrowing`, then byte planes if
        a coder follows).
    """

    id: int
    transform: str
    coder: str

    @property
    def name(self) -> str:
        parts = (self.transform, self.coder)
        return "+".join(part for part in parts if part not in ("plain", "none"))

    def suits(self, itemsize: int) -> bool:
        if self.transform == "narrow":
            return itemsize in narrowing.ITEMSIZES
        return self.transform == "plain" or itemsize > 1

    def encode(self, raw: Bytes, itemsize: int) -> list[Bytes] | None:
        n_items = raw.nbytes // itemsize
        whole, tail = raw[: n_items * itemsize], raw[n_items * itemsize :]
        parameters = b""
        if self.transform == "plain":
            whole, tail = raw, raw[raw.nbytes :]
        elif not self.suits(itemsize) or not n_items:
            return None
        elif self.transform == "shuffle":
            whole = planes.split(whole, itemsize)
        else:
            narrowed = narrowing.narrow(whole, itemsize)
            if narrowed is None:
                return None
            parameters, whole, width = narrowed
            if self.coder != "none" and width > 1:
                whole = planes.split(whole, width)
        if not takes(self.coder, whole.nbytes):
            return None
        body = compress(self.coder, whole)
        rest = [np.frombuffer(parameters, dtype=np.uint8), tail, body]
        return sealed(self.id, raw.nbytes, itemsize, rest)

    def decode_into(self, payload: Any, out: Bytes, itemsize: int) -> None:
        if not 1 <= itemsize <= 255 or not self.suits(itemsize):
            raise ProtocolError(f"{self.name} does not encode items of {itemsize} bytes")
        rest = opened(self.id, self.name, payload, out.nbytes, itemsize)
        if self.transform == "plain":
            np.copyto(out, decompress(self.coder, rest, out.nbytes))
        else:
            self._decode_items(rest, out, itemsize)

    def _decode_items(self, rest: Bytes, out: Bytes, itemsize: int) -> None:
        n_items, tail_nbytes = divmod(out.nbytes, itemsize)
        if not n_items:
            raise ProtocolError(f"a section encoded with {self.name} has no whole item")
        fields: tuple[int, ...] = ()
        if self.transform == "narrow":
            fields = narrowing.parameters_of(
                rest[: narrowing.PARAMETERS_NBYTES].tobytes(), itemsize
            )
            rest = rest[narrowing.PARAMETERS_NBYTES :]
        if rest.nbytes < tail_nbytes:
            raise ProtocolError("an encoded section is cut short")
        whole = out[: n_items * itemsize]
        out[whole.nbytes :] = rest[:tail_nbytes]
        rest = rest[tail_nbytes:]
        if self.transform == "shuffle":
            planes.merge(decompress(self.coder, rest, whole.nbytes), itemsize, whole)
            return
        width = fields[1]
        codes = decompress(self.coder, rest, narrowing.n_codes(fields, n_items) * width)
        if self.coder != "none" and width > 1:
            items = np.empty(codes.nbytes, dtype=np.uint8)
            planes.merge(codes, width, items)
            codes = items
        narrowing.widen_into(codes, fields, whole, itemsize)


#: Host codecs by their numbers on the wire. Numbers are never reused. Numbers from 128 on are for
#: codecs of devices.
HOST_CODECS: Mapping[int, Codec] = {
    codec.id: codec
    for codec in (
        HostCodec(1, "plain", "lz4"),
        HostCodec(2, "plain", "zstd"),
        HostCodec(3, "shuffle", "lz4"),
        HostCodec(4, "shuffle", "zstd"),
        HostCodec(5, "narrow", "none"),
        HostCodec(6, "narrow", "lz4"),
        HostCodec(7, "narrow", "zstd"),
    )
}
