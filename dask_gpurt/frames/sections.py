"""The Arrow section of a packed shard: how to read it, and its parts for compression.

This module does not compress.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dask_gpurt.frames.adapter import Section


def read_batch(section: npt.NDArray[np.uint8]) -> pa.RecordBatch:
    """Return the record batch in an Arrow section.

    Raises
    ------
    ValueError
        The bytes are not a stream of one record batch.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(section)) as reader:
            return reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ValueError(f"damaged Arrow section in a shard: {error}") from error


def arrow_sections(
    buffer: npt.NDArray[np.uint8], offset: int, nbytes: int, names: Sequence[str]
) -> list[Section]:
    """Split an Arrow stream into its buffers and the metadata between them.

    Each buffer is a section, because string offsets and string bytes compress differently, and so
    do two columns of strings.

    Parameters
    ----------
    buffer, offset, nbytes
        A packed shard, and the place of its Arrow section.
    names
        Name of each column of the stream.

    Raises
    ------
    ValueError
        The bytes are not a stream of one record batch.
    """
    stream = buffer[offset : offset + nbytes]
    first = stream.ctypes.data
    found: list[Section] = []
    for name, column in zip(names, read_batch(stream).columns, strict=True):
        for what, part, itemsize in _parts(column):
            start = offset + part.address - first
            # Columns may share a buffer. A column may also own an empty one outside the stream.
            if offset <= start and start + part.size <= offset + nbytes and part.size:
                found.append((f"{name} {what}", start, part.size, itemsize))
    return list(covering(found, offset, offset + nbytes, "arrow metadata"))


def covering(found: Iterable[Section], start: int, stop: int, gap: str) -> Iterator[Section]:
    """Yield the sections in order and without overlaps; gaps become sections named `gap`."""
    position, n_gaps = start, 0
    for section in sorted(found, key=lambda one: one[1]):
        _, offset, nbytes, _ = section
        if offset < position:
            continue  # columns may share a buffer
        if offset > position:
            yield (f"{gap} {n_gaps}", position, offset - position, 1)
            n_gaps += 1
        yield section
        position = offset + nbytes
    if stop > position:
        yield (f"{gap} {n_gaps}", position, stop - position, 1)


def _parts(column: pa.Array) -> Iterator[tuple[str, pa.Buffer, int]]:
    """Yield name, buffer and item size of each buffer of a column; 1 for an unknown item size."""
    kind = column.type
    buffers = column.buffers()
    names = [f"buffer {number}" for number in range(len(buffers))]
    itemsizes = [1] * len(buffers)
    names[:1] = ["validity"]
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if wide or pa.types.is_string(kind) or pa.types.is_binary(kind):
        names[1:] = ["offsets", "values"]
        itemsizes[1] = 8 if wide else 4
    elif pa.types.is_primitive(kind):
        names[1] = "values"
        itemsizes[1] = max(1, kind.bit_width // 8)
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        names[1] = "offsets"
        itemsizes[1] = 4
    for name, part, itemsize in zip(names, buffers, itemsizes, strict=True):
        if part is not None:
            yield name, part, itemsize
