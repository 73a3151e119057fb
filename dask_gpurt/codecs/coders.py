"""The entropy coders: pyarrow's LZ4 and Zstandard.

Both release the interpreter lock, and neither writes beyond the expected length. pyarrow does not
say how many bytes a decoder wrote. A decoder that stops short leaves the rest of its output
undefined. So coders do not verify what they decode; `codecs.cpu` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dask_gpurt.codecs.codec import Bytes
from dask_gpurt.errors import ProtocolError

if TYPE_CHECKING:
    import pyarrow as pa

#: LZ4 counts in C integers. With more bytes it encodes only a part, or fails; above 4 GiB it does
#: so silently.
LZ4_MOST_NBYTES = 0x7E000000


def _codec(coder: str) -> pa.Codec:
    """Return a new coder. pyarrow does not promise that threads may share one.

    Level 1 of Zstandard, because a network of 100 MB/s is already faster than the next levels.
    """
    # Not at import: every worker imports this module, and a program may compress nothing.
    import pyarrow as pa

    return pa.Codec("lz4_raw") if coder == "lz4" else pa.Codec(coder, compression_level=1)


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
    return np.frombuffer(_codec(coder).compress(raw), dtype=np.uint8)


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
    import pyarrow as pa

    try:
        decoded = _codec(coder).decompress(payload, decompressed_size=nbytes)
    except MemoryError:
        raise  # Arrow's MemoryError is an ArrowException, too
    except (pa.ArrowException, OSError) as error:
        raise ProtocolError(f"damaged {coder} bytes: {error}") from error
    return np.frombuffer(decoded, dtype=np.uint8)
