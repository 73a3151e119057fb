"""The geometry of a rechunk: which part of an input chunk goes where in an output chunk.

This module handles numbers only. It knows neither arrays nor where chunks live. Each axis is cut
independently. A *piece* is the part of one input chunk in one output chunk, the product of one span
for each axis. The module never lists the pieces of all pairs. It computes the pieces of one input
or output chunk when they are needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

#: Position of a chunk in its grid.
Index = tuple[int, ...]
#: Part of a chunk.
Box = tuple[slice, ...]
#: Shape of a part. None along an axis whose lengths are unknown until the chunk exists.
Shape = tuple[int | None, ...]

#: A whole axis of unknown length.
_WHOLE = slice(None)


class ChunkSpan(NamedTuple):
    """The part of one input chunk in one output chunk, along one axis."""

    input: int
    output: int
    #: Position in the input chunk, and in the output chunk.
    source: slice
    place: slice
    length: int | None


@dataclass(frozen=True)
class Axis:
    """Two partitions of one axis into chunks.

    Parameters
    ----------
    old, new
        Lengths of the chunks. An unknown length (NaN) is allowed if `new` is `old`.
    """

    old: tuple[float, ...]
    new: tuple[float, ...]

    @cached_property
    def is_known(self) -> bool:
        return not any(math.isnan(length) for length in self.old)

    @cached_property
    def spans(self) -> tuple[ChunkSpan, ...]:
        """All spans, in the order of the axis.

        An empty output chunk has one span, because it needs a source. An empty input chunk has no
        span.
        """
        if not self.is_known:
            return tuple(ChunkSpan(i, i, _WHOLE, _WHOLE, None) for i in range(len(self.old)))
        starts = [0, *accumulate(int(length) for length in self.old)]
        stops = starts[1:]
        if stops[-1] != sum(self.new):
            raise ValueError(f"chunks of total length {stops[-1]} cannot become {self.new}")
        found = []
        first = 0
        for output, length in enumerate(self.new):
            end = first + int(length)
            # The first input chunk that ends at or after the start of the output chunk.
            i = bisect_left(stops, first + 1 if length else first)
            while True:
                a, b = max(first, starts[i]), min(end, stops[i])
                if b > a or not length:
                    source = slice(a - starts[i], b - starts[i])
                    place = slice(a - first, b - first)
                    found.append(ChunkSpan(i, output, source, place, b - a))
                if stops[i] >= end:
                    break
                i += 1
            first = end
        return tuple(found)

    @cached_property
    def of_input(self) -> tuple[tuple[ChunkSpan, ...], ...]:
        return _grouped([span.input for span in self.spans], self.spans, len(self.old))

    @cached_property
    def of_output(self) -> tuple[tuple[ChunkSpan, ...], ...]:
        return _grouped([span.output for span in self.spans], self.spans, len(self.new))


def _grouped(
    numbers: Sequence[int], spans: Sequence[ChunkSpan], n_groups: int
) -> tuple[tuple[ChunkSpan, ...], ...]:
    groups: list[list[ChunkSpan]] = [[] for _ in range(n_groups)]
    for number, span in zip(numbers, spans, strict=True):
        groups[number].append(span)
    return tuple(map(tuple, groups))


class Rechunking:
    """Two chunkings of one array.

    Parameters
    ----------
    old, new
        Lengths of the chunks along each axis, as in Dask.

    Raises
    ------
    ValueError
        The two do not describe one array.
    """

    def __init__(self, old: Sequence[Sequence[float]], new: Sequence[Sequence[float]]) -> None:
        self.axes = tuple(Axis(tuple(o), tuple(n)) for o, n in zip(old, new, strict=True))

    @property
    def ndim(self) -> int:
        return len(self.axes)

    def number(self, index: Index) -> int:
        """Return the number of an input chunk. Numbers ascend with positions in the grid."""
        number = 0
        for axis, position in zip(self.axes, index, strict=True):
            number = number * len(axis.old) + position
        return number

    def has_shape(self, index: Index, shape: Sequence[int]) -> bool:
        """Return whether an input chunk of this shape matches the plan."""
        return len(shape) == self.ndim and all(
            length == axis.old[position] or not axis.is_known
            for axis, position, length in zip(self.axes, index, shape, strict=True)
        )

    def of_input(self, index: Index) -> Iterator[tuple[Index, Box, Shape]]:
        """Yield the pieces of an input chunk: output chunk, part of the input chunk, and shape."""
        spans = [axis.of_input[i] for axis, i in zip(self.axes, index, strict=True)]
        outputs = product(*([span.output for span in along] for along in spans))
        sources = product(*([span.source for span in along] for along in spans))
        shapes = product(*([span.length for span in along] for along in spans))
        return zip(outputs, sources, shapes, strict=True)

    def of_output(self, index: Index) -> tuple[tuple[int, ...], Iterator[tuple[Box, Shape]]]:
        """Return the pieces of an output chunk, in the order of the input chunks' numbers.

        Returns
        -------
        number of pieces along each axis; then for each piece its place in the output and its shape
        """
        spans = [axis.of_output[i] for axis, i in zip(self.axes, index, strict=True)]
        places = product(*([span.place for span in along] for along in spans))
        shapes = product(*([span.length for span in along] for along in spans))
        return tuple(map(len, spans)), zip(places, shapes, strict=True)

    def shape_of_output(self, index: Index) -> Shape:
        return tuple(
            int(axis.new[i]) if axis.is_known else None
            for axis, i in zip(self.axes, index, strict=True)
        )


def filled(shape: Shape, of_chunk: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a piece, with unknown lengths taken from its input chunk."""
    if None not in shape:
        return shape  # type: ignore[return-value]
    return tuple(
        whole if length is None else length for length, whole in zip(shape, of_chunk, strict=True)
    )
