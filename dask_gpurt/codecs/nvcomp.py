"""The codecs that run on a CUDA device: LZ4 and Zstandard as nvCOMP has them.

For bytes in the host's memory, as the port wants it: they are copied to the device, coded there,
and what came of them is copied back. A payload is a CRC-32 as those of the host's codecs have it
(`codecs.cpu`), then nvCOMP's own format, chunk by chunk. nvCOMP is not free software and is not
installed by itself; it is loaded at the first call.

They are for peers that say that they can decode them. Whether they are used is decided as for any
other codec, by what they do with a sample here and now, copies to the device and back included.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dask_gpurt.codecs.codec import Bytes, Codec
from dask_gpurt.codecs.cpu import opened, sealed
from dask_gpurt.errors import ProtocolError

#: What nvCOMP calls each coder.
_ALGORITHMS = {"lz4": "LZ4", "zstd": "Zstd"}
#: Chunks are coded beside each other: smaller ones fill the device, larger ones compress better.
#: nvCOMP's default.
_CHUNK_NBYTES = 64 << 10

#: A process that uses a device has loaded one of these.
_DEVICE_LIBRARIES = {"cudf", "cupy", "rmm"}

_of_thread = threading.local()


@dataclass(frozen=True)
class NvcompCodec:
    """One of nvCOMP's coders, over the bytes as they are."""

    id: int
    coder: str

    @property
    def name(self) -> str:
        return f"nvcomp {self.coder}"

    def suits(self, itemsize: int) -> bool:
        return True

    def encode(self, raw: Bytes, itemsize: int) -> list[Bytes] | None:
        if not raw.nbytes:
            return None
        try:
            encoded = _on_host(_coder(self.coder).encode(_on_device(raw)))
        except RuntimeError:
            return None  # a device that has no room is no reason not to send
        return sealed(self.id, raw.nbytes, itemsize, [encoded])

    def decode_into(self, payload: Any, out: Bytes, itemsize: int) -> None:
        if not 1 <= itemsize <= 255:
            raise ProtocolError(f"{self.name} does not encode items of {itemsize} bytes")
        body = opened(self.id, self.name, payload, out.nbytes, itemsize)
        if self.id not in usable():
            raise ProtocolError(f"there is no {self.name} here, which nobody said there was")
        coder = _coder(self.coder)
        try:
            source = _on_device(body)
            # It allocates what the payload says.
            announced = coder.get_uncomp_buffer_size(source)
            if announced != out.nbytes:
                raise ProtocolError(f"{announced} bytes where {out.nbytes} were announced")
            decoded = _on_host(coder.decode(source))
        except (RuntimeError, ValueError) as error:
            raise ProtocolError(f"damaged {self.name} bytes: {error}") from error
        if decoded.nbytes != out.nbytes:
            raise ProtocolError(f"{decoded.nbytes} bytes where {out.nbytes} were announced")
        np.copyto(out, decoded)


#: By their numbers on the wire, of which those from 128 are for codecs of devices.
NVCOMP_CODECS: Mapping[int, Codec] = {
    codec.id: codec for codec in (NvcompCodec(128, "lz4"), NvcompCodec(129, "zstd"))
}


def usable() -> Mapping[int, Codec]:
    """Those of them that work here: all, or none without nvCOMP or a device.

    Not on an event loop: it loads nvCOMP.
    """
    # A context of CUDA takes seconds and hundreds of megabytes: a process that has done without a
    # device goes on doing so.
    return _usable() if _DEVICE_LIBRARIES & sys.modules.keys() else {}


@cache
def _usable() -> Mapping[int, Codec]:
    try:
        _on_device(np.zeros(1, dtype=np.uint8))
    except (ImportError, OSError, RuntimeError):
        return {}
    return NVCOMP_CODECS


@cache
def _library() -> Any:
    with contextlib.suppress(ImportError):
        # Loaded before it, nvCOMP's libraries keep cuDF from finding its own.
        import cudf  # noqa: F401
    from nvidia import nvcomp

    return nvcomp


def _coder(coder: str) -> Any:
    """This thread's: it has a stream and scratch memory, which two threads must not share."""
    coders: dict[str, Any] = _of_thread.__dict__
    found = coders.get(coder)
    if found is None:
        found = coders[coder] = _library().Codec(
            algorithm=_ALGORITHMS[coder], uncomp_chunk_size=_CHUNK_NBYTES
        )
    return found


def _on_device(raw: Bytes) -> Any:
    # nvCOMP does not say whether it takes memory that is read-only.
    return _library().as_array(raw if raw.flags.writeable else raw.copy()).cuda()


def _on_host(array: Any) -> Bytes:
    return np.asarray(array.cpu()).view(np.uint8).reshape(-1)
