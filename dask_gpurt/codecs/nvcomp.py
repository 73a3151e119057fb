"""Codecs that run on a CUDA device: LZ4 and Zstandard of nvCOMP.

They encode bytes in host memory. The bytes are copied to the device and encoded there, and the
result is copied back. A payload is a CRC-32 as in `codecs.cpu`, followed by nvCOMP's own chunked
format. nvCOMP is not free software and must be installed separately. It is loaded at the first
call.

These codecs serve peers that announce that they can decode them. Like any codec, one is chosen by
its current speed and ratio on a sample, including the copies to the device and back.
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

#: nvCOMP's name of each coder.
_ALGORITHMS = {"lz4": "LZ4", "zstd": "Zstd"}
#: nvCOMP's default. Chunks are encoded in parallel: smaller ones fill the device, larger ones
#: compress better.
_CHUNK_NBYTES = 64 << 10

#: A process that uses a device has imported one of these.
_DEVICE_LIBRARIES = {"cudf", "cupy", "rmm"}

_of_thread = threading.local()


@dataclass(frozen=True)
class NvcompCodec:
    """One of nvCOMP's coders, without a transform."""

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
        except (RuntimeError, MemoryError):
            return None  # the device has no room: send the bytes raw
        return sealed(self.id, raw.nbytes, itemsize, [encoded])

    def decode_into(self, payload: Any, out: Bytes, itemsize: int) -> None:
        if not 1 <= itemsize <= 255:
            raise ProtocolError(f"{self.name} does not encode items of {itemsize} bytes")
        body = opened(self.id, self.name, payload, out.nbytes, itemsize)
        if self.id not in usable():
            raise ProtocolError(f"this worker has no {self.name} and did not offer it to peers")
        coder = _coder(self.coder)
        try:
            source = _on_device(body)
            # Check the announced size first: decoding allocates that much.
            announced = coder.get_uncomp_buffer_size(source)
            if announced != out.nbytes:
                raise ProtocolError(f"{announced} bytes came where {out.nbytes} were announced")
            decoded = _on_host(coder.decode(source))
        except MemoryError as error:
            raise MemoryError(
                f"no room on the device to decode {out.nbytes} bytes of {self.name}; "
                "gpurt.shuffle.compression: none sends them raw"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise ProtocolError(f"damaged {self.name} bytes: {error}") from error
        if decoded.nbytes != out.nbytes:
            raise ProtocolError(f"{decoded.nbytes} bytes came where {out.nbytes} were announced")
        np.copyto(out, decoded)


#: Codecs by their numbers on the wire. Numbers from 128 on are for codecs of devices.
NVCOMP_CODECS: Mapping[int, Codec] = {
    codec.id: codec for codec in (NvcompCodec(128, "lz4"), NvcompCodec(129, "zstd"))
}


def usable() -> Mapping[int, Codec]:
    """Return the codecs that work here: all, or none without nvCOMP or a device.

    Do not call this on an event loop: it loads nvCOMP.
    """
    # A CUDA context takes seconds and hundreds of megabytes, so a process that uses no device must
    # not create one.
    if not _DEVICE_LIBRARIES & sys.modules.keys():
        return {}
    try:
        return _usable()
    except MemoryError:
        return {}  # the device is full now, and may have room later


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
        # If nvCOMP's libraries are loaded first, cuDF does not find its own. Not `import cudf`: it
        # replaces CuPy's allocator, and this process may use CuPy alone.
        import libcudf

        libcudf.load_library()
    from nvidia import nvcomp

    return nvcomp


def _coder(coder: str) -> Any:
    """Return this thread's coder. Threads cannot share its stream and scratch memory."""
    coders: dict[str, Any] = _of_thread.__dict__
    found = coders.get(coder)
    if found is None:
        found = coders[coder] = _library().Codec(
            algorithm=_ALGORITHMS[coder], uncomp_chunk_size=_CHUNK_NBYTES
        )
    return found


def _on_device(raw: Bytes) -> Any:
    # nvCOMP does not document whether it accepts read-only memory.
    return _library().as_array(raw if raw.flags.writeable else raw.copy()).cuda()


def _on_host(array: Any) -> Bytes:
    return np.asarray(array.cpu()).view(np.uint8).reshape(-1)
