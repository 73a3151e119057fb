"""The entropy coders: pyarrow's LZ4 and Zstandard.

Both release the interpreter lock, and neither writes beyond the expected length. pyarrow does not
say how many bytes a decoder wrote. A decoder that stops short leaves the rest of its output
undefined. So coders do not verify what they decode; `codecs.cpu` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from dask_gpurt.codecs.codec import Bytes
from dask_gpurt.errors import ProtocolError

#: Constructor of each coder. Level 1, because a network of 100 MB/s is already faster than the next
#: levels.
_MAKERS: dict[str, Callable[[], Any]] = {
    "lz4": lambda: pa.Codec("lz4_raw"),
    "zstd": lambda: pa.Codec("zstd", compression_level=1),
}


#: LZ4 counts in C integers. With more bytes it encodes only a part, or fails; above 4 GiB it does
#: so silently.
LZ4_MOST_NBYTES = 0x7E000000


def takes(coder: str, nbytes: int) -> bool:
    """Return whether a coder can encode this many bytes at once."""
    return coder != "lz4" or nbytes <= LZ4_MOST_NBYTES


def compress(coder: str, raw: Bytes) -> Bytes:
    """Return the compressed bytes, which may be longer than the input. `none` copies nothing.

    Raises
    ------
    ValueError
        The coder does not take this many bytes.
    """
    if not takes(coder, raw.nbytes):
        raise ValueError(f"{raw.nbytes} bytes are more than {coder} encodes at once")
    if coder == "none" or not raw.nbytes:
        return raw
    # A new codec object for each call. pyarrow does not promise that threads may share one, and
    # creating one takes a microsecond.
    return np.frombuffer(_MAKERS[coder]().compress(pa.py_buffer(raw)), dtype=np.uint8)


def decompress(coder: str, payload: Bytes, nbytes: int) -> Bytes:
    """Return at most `nbytes` decoded bytes, in an array of exactly that length.

    Raises
    ------
    ProtocolError
        The payload is damaged or too long. A payload that is too short goes unnoticed.
    MemoryError
        The process lacks memory for the result. The payload may be valid.
    """
    if coder == "none" or not nbytes:
        if payload.nbytes != nbytes:
            raise ProtocolError(f"{payload.nbytes} bytes came where {nbytes} were announced")
        return payload
    if not takes(coder, nbytes):
        raise ProtocolError(f"{nbytes} bytes are more than {coder} encodes at once")
    try:
        decoded = _MAKERS[coder]().decompress(pa.py_buffer(payload), decompressed_size=nbytes)
    except MemoryError:
        raise  # Arrow's MemoryError is an ArrowException too
    except (pa.ArrowException, OSError) as error:
        raise ProtocolError(f"damaged {coder} bytes: {error}") from error
    return np.frombuffer(decoded, dtype=np.uint8)
