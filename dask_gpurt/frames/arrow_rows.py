"""Rows of Arrow arrays: what is prepared once for a column, and the gather itself.

Arrow gathers any type, but has to look at two offsets of each string to know where it is. Flags,
codes and identifiers are as long as each other, and then the offsets say nothing: such a column is
gathered as the fixed-width values it holds, in a sixth (one byte) to six tenths of the time. What
else an Arrow column goes through is up to `frames.pandas_` and `frames.joining`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dask_gpurt.frames.gather import Rows, gather_into

#: Types of bytes of any length, and what their offsets are.
_OFFSETS = {
    pa.string(): np.int32,
    pa.binary(): np.int32,
    pa.large_string(): np.int64,
    pa.large_binary(): np.int64,
}


class ArrowRows:
    """Gathers rows of one column.

    Parameters
    ----------
    column
        At least one row.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        if column.num_chunks > 1:
            # Gathering from one chunk is several times faster than from many. A table leaves it at
            # several where offsets of 32 bits do not reach through one.
            column = pa.table([column], names=["column"]).combine_chunks().column(0)
        self._array = column.chunk(0) if column.num_chunks == 1 else column
        self._values = _fixed_width(self._array)

    @property
    def nbytes(self) -> int:
        return int(self._array.nbytes)

    def take(self, rows: Rows) -> pa.Array:
        """Values of these rows, in memory of their own. Row numbers are not checked."""
        values = self._values
        if values is None:
            taken = pc.take(self._array, pa.array(rows), boundscheck=False)
            return _one_array(taken) if isinstance(taken, pa.ChunkedArray) else taken
        out = np.empty(len(rows), dtype=values.dtype)
        gather_into(values, rows, out)
        width = values.itemsize
        offset_type = _OFFSETS[self._array.type]
        offsets = np.arange(0, (len(rows) + 1) * width, width, dtype=offset_type)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(out)]
        return pa.Array.from_buffers(self._array.type, len(rows), buffers, null_count=0)


def _fixed_width(array: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any] | None:
    """Values that are all as long as each other, as an array; None of anything else."""
    offset_type = _OFFSETS.get(array.type)
    if offset_type is None or isinstance(array, pa.ChunkedArray) or array.null_count:
        return None
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=offset_type)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    width, remainder = divmod(int(offsets[-1] - offsets[0]), len(array))
    if remainder or not width or not (np.diff(offsets) == width).all():
        return None
    values = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return values if width == 1 else values.view(f"V{width}")


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
