"""Type, shape and order of a chunk, and their encoding as a NumPy file header."""

from __future__ import annotations

import contextlib
import io
import tokenize
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from dask_gpurt.frames.chunks.device_arrays import Devices

#: Longest valid layout.
_LONGEST_LAYOUT = 1 << 16


@lru_cache(maxsize=1024)
def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse shape, order and type in a NumPy header. A run has few headers for many shards.

    NumPy parses with `ast`, which has one recursion counter for all threads in CPython 3.11. If two
    threads parse at the same time, one may fail. A retry succeeds.
    """
    for _ in range(2):
        with contextlib.suppress(SystemError):
            return _read(header)
    return _read(header)


def _read(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = io.BytesIO(header)
    np.lib.format.read_magic(file)
    return np.lib.format.read_array_header_1_0(file, _LONGEST_LAYOUT)


@dataclass(frozen=True)
class ChunkLayout:
    """Type and shape of the input chunk of pieces, and the order of their elements.

    Attributes
    ----------
    library
        Name of the device array type; empty for NumPy.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    library: str = ""

    @staticmethod
    def of(chunk: Any, devices: Devices) -> ChunkLayout | None:
        """Return the layout of a chunk, or None unless its elements are plain memory."""
        # Subclasses have a meaning beyond their memory.
        kind = type(chunk)
        library = "" if kind is np.ndarray else f"{kind.__module__}.{kind.__qualname__}"
        if (library and library not in devices) or chunk.dtype.hasobject:
            return None
        if not chunk.dtype.itemsize:
            return None
        order = chunk.flags
        is_fortran = order.f_contiguous and not order.c_contiguous
        layout = ChunkLayout(chunk.dtype, chunk.shape, bool(is_fortran), library)
        return layout if layout.says_it_all else None

    @property
    def says_it_all(self) -> bool:
        """True if the dtype survives encoding and decoding."""
        if self.dtype.metadata is not None:
            return False
        if self.dtype.isbuiltin == 1:
            return True
        try:
            again = ChunkLayout.from_key(self.key).dtype
        except (ValueError, TypeError):
            return False
        # Equal dtypes may still differ in alignment or in being records, at any depth.
        return (
            type(again) is type(self.dtype)
            and again == self.dtype
            and again.type is self.dtype.type
            and repr(again) == repr(self.dtype)
        )

    @cached_property
    def key(self) -> bytes:
        """The library's name, followed by a NumPy file header with the layout."""
        file = io.BytesIO()
        if self.library:
            file.write(self.library.encode() + b"\n")
        head = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": self.is_fortran,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(file, head)
        return file.getvalue()

    @staticmethod
    def from_key(key: bytes) -> ChunkLayout:
        library, header = "", key
        if not key.startswith(np.lib.format.MAGIC_PREFIX):
            name, _, header = key.partition(b"\n")
            library = name.decode("ascii")
        try:
            shape, is_fortran, dtype = _parsed(header)
        except (tokenize.TokenError, SyntaxError, TypeError, OverflowError) as error:
            # NumPy retries a header that it cannot parse. The retry fails with other errors.
            raise ValueError(f"no chunk has the layout {key!r}") from error
        if dtype.hasobject or not dtype.itemsize or any(length < 0 for length in shape):
            raise ValueError(f"no chunk has the layout {key!r}")
        return ChunkLayout(dtype, shape, is_fortran, library)

    def shaped(self, rows: Any, shape: tuple[int, ...]) -> Any:
        """Return a piece of this shape over its rows."""
        if 0 in shape:
            rows = rows[:0]
        return rows.reshape(shape, order="F" if self.is_fortran else "C")
