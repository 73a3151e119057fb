"""Sections of Arrow columns in a packed shard, for compression. This module does not compress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dask_gpurt.frames.adapter import Section


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
    try:
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            batch = reader.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ValueError(f"damaged Arrow section in a shard: {error}") from error
    first = stream.ctypes.data
    found: list[Section] = []
    for name, column in zip(names, batch.columns, strict=True):
        for what, part, itemsize in _parts(column):
            start = offset + part.address - first
            # Columns may share a buffer. A column may also own an empty one outside the stream.
            if offset <= start and start + part.size <= offset + nbytes and part.size:
                found.append((f"{name} {what}", start, part.size, itemsize))
    return list(_covering(sorted(found, key=lambda s: s[1]), offset, offset + nbytes))


def _covering(found: list[Section], start: int, stop: int) -> Iterator[Section]:
    """Yield the sections without overlaps, and fill the gaps."""
    position, gaps = start, 0
    for section in found:
        _, offset, nbytes, _ = section
        if offset < position:
            continue
        if offset > position:
            yield (f"arrow metadata {gaps}", position, offset - position, 1)
            gaps += 1
        yield section
        position = offset + nbytes
    if stop > position:
        yield (f"arrow metadata {gaps}", position, stop - position, 1)


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
