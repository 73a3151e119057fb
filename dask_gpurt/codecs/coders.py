"""The entropy coders: LZ4 and Zstandard as pyarrow carries them.

Both run without the interpreter lock, and neither writes beyond the length it is told to expect.
pyarrow does not say how many bytes a decoder wrote: one that stops short leaves the rest of its
output as it was. So a coder alone does not vouch for what it decodes; `codecs.cpu` checks what
it hands in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from dask_gpurt.codecs.codec import Bytes
from dask_gpurt.errors import ProtocolError

#: Name of each coder and how pyarrow makes it. Level 1: a network of 100 MB/s is already faster
#: than the next levels.
_MAKERS: dict[str, Callable[[], Any]] = {
    "lz4": lambda: pa.Codec("lz4_raw"),
    "zstd": lambda: pa.Codec("zstd", compression_level=1),
}


#: LZ4 counts in C integers. Of more it encodes a part, or fails, and of more than 4 GiB without a
#: word.
LZ4_MOST_NBYTES = 0x7E000000


def takes(coder: str, nbytes: int) -> bool:
    """Whether a coder can encode so many bytes at once."""
    return coder != "lz4" or nbytes <= LZ4_MOST_NBYTES


def compress(coder: str, raw: Bytes) -> Bytes:
    """Compressed bytes; may be longer than what went in. The coder `none` passes them on.

    Raises
    ------
    ValueError
        These are more than it `takes`.
    """
    if not takes(coder, raw.nbytes):
        raise ValueError(f"{raw.nbytes} bytes are more than {coder} encodes at once")
    if coder == "none" or not raw.nbytes:
        return raw
    # A codec object each time: pyarrow does not promise that one may be used by two threads, and
    # making it takes a microsecond.
    return np.frombuffer(_MAKERS[coder]().compress(pa.py_buffer(raw)), dtype=np.uint8)


def decompress(coder: str, payload: Bytes, nbytes: int) -> Bytes:
    """At most `nbytes` decoded bytes in an array of exactly that length.

    Raises
    ------
    ProtocolError
        The payload is damaged or holds more. One that holds less goes unnoticed here.
    MemoryError
        There is no room for what it holds, which says nothing of the payload.
    """
    if coder == "none" or not nbytes:
        if payload.nbytes != nbytes:
            raise ProtocolError(f"{payload.nbytes} bytes where {nbytes} were announced")
        return payload
    if not takes(coder, nbytes):
        raise ProtocolError(f"{nbytes} bytes are more than {coder} encodes at once")
    try:
        decoded = _MAKERS[coder]().decompress(pa.py_buffer(payload), decompressed_size=nbytes)
    except MemoryError:
        raise  # Arrow's own is an ArrowException as well
    except (pa.ArrowException, OSError) as error:
        raise ProtocolError(f"damaged {coder} bytes: {error}") from error
    return np.frombuffer(decoded, dtype=np.uint8)
