"""Row grouping and gathering: the two inner loops of a partition step.

Two kernels touch every byte of an outgoing frame: a counting sort of partition numbers, and a
gather of rows into memory of the caller. This module does not know what a column means
(`frames.columns`) nor where rows go (`shuffle.plan`).

pandas has the fastest kernels for both that need no compiler here, but they are not public. This
module looks them up once. If they are missing, it uses NumPy, with the same results: a third of the
speed for the sort, half for the gather.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]
_Gather = Callable[[Rows, npt.NDArray[Any]], object]
_Prepared = tuple[_Gather, npt.NDArray[Any] | None, Sequence[npt.NDArray[Any]]]

#: Rows in a block of a column. With eight bytes a row, a block has 2 MiB and fits the last cache.
BLOCK_ROWS = 1 << 18
#: Use blocks only if selections get this many rows of a block on average: each piece costs a call.
LEAST_PIECE_ROWS = 1 << 11
#: Read ahead only blocks of this size. Smaller ones are probably in a nearer cache; larger ones do
#: not stay in any cache.
_READ_AHEAD_ROWS = range(1 << 14, 1 << 20)
_LINE_NBYTES = 64

#: The signed integer type that moves values of each size.
_CARRIER = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class Kernels(NamedTuple):
    """The functions of pandas that this module uses: gather by bytes of a value, and sort."""

    take: Mapping[int, Callable[..., object]]
    groupsort: Callable[[Rows, int], tuple[Rows, Rows]] | None


@functools.cache
def _kernels() -> Kernels:
    # Not at import: every worker imports this module, and a program may need no pandas.
    try:
        from pandas._libs import algos
    except ImportError:  # pragma: no cover - every pandas so far has it
        return Kernels({}, None)
    take = {}
    for itemsize, carrier in _CARRIER.items():
        name = np.dtype(carrier).name
        kernel = getattr(algos, f"take_1d_{name}_{name}", None)
        if kernel is not None:
            take[itemsize] = kernel
    return Kernels(take, getattr(algos, "groupsort_indexer", None))


def group_rows(slots: Rows, n_slots: int) -> tuple[Rows, Rows]:
    """Sort row numbers by slot and keep their order within each slot.

    Parameters
    ----------
    slots
        Slot of each row; -1 for a row that no worker wants.
    n_slots
        Number of slots. Every entry of `slots` is below it.

    Returns
    -------
    rows, offsets
        `rows[offsets[s]:offsets[s + 1]]` are the row numbers of slot `s`, ascending.
    """
    offsets = np.zeros(n_slots + 1, dtype=np.intp)
    groupsort = _kernels().groupsort
    if groupsort is not None:
        rows, counts = groupsort(slots, n_slots)
        np.cumsum(counts[1:], out=offsets[1:])
        return rows[counts[0] :], offsets
    wanted = np.flatnonzero(slots >= 0)
    kept = slots[wanted]
    # NumPy sorts 16-bit integers by radix, and wider ones by comparison.
    narrow = kept.astype(np.uint16) if n_slots <= 1 << 16 else kept
    rows = wanted[np.argsort(narrow, kind="stable")]
    np.cumsum(np.bincount(kept, minlength=n_slots), out=offsets[1:])
    return rows, offsets


class RowCounts:
    """The values `start + step * row`, without memory for them. Most indexes have such values."""

    dtype = np.dtype(np.int64)

    def __init__(self, start: int, step: int) -> None:
        self.start = start
        self.step = step


Values = npt.NDArray[Any] | RowCounts


def as_array(values: Values, n_rows: int) -> npt.NDArray[Any]:
    """Return the values of so many rows in memory."""
    if isinstance(values, RowCounts):
        return values.start + values.step * np.arange(n_rows, dtype=values.dtype)
    return values


def gather_into(values: Values, rows: Rows, out: npt.NDArray[Any]) -> None:
    """Write `values[rows]` into `out`. Both are one-dimensional, with one dtype."""
    gather, _, (out,) = _prepared(values, [out])
    gather(rows, out)


def gather_columns(
    columns: Iterable[tuple[Values, Sequence[npt.NDArray[Any]]]],
    rows_of: Sequence[Rows],
    n_rows: int,
    *,
    ascending: bool = False,
) -> None:
    """Write `values[rows]` into `out`, for each column and each of several row selections.

    The rows of one selection are far apart, and memory is slow for scattered reads. So each column
    is first read sequentially, which is fast, and then gathered while it is in the processor's
    cache. A column larger than the cache is processed in blocks of rows, unless the pieces would be
    too small.

    Parameters
    ----------
    columns
        Values of each column, and output memory for each selection.
    rows_of
        Row numbers of each selection.
    n_rows
        Length of the columns.
    ascending
        The numbers of each selection ascend. Blocks are used only then.
    """
    blocks = list(_blocks(rows_of, n_rows, ascending))
    prepared: Iterable[_Prepared] = (_prepared(values, outs) for values, outs in columns)
    if len(blocks) > 1:
        # With one block, a generator: the prepared arrays of thousands of columns take memory.
        prepared = list(prepared)
    for begin, end, pieces in blocks:
        for gather, source, outs in prepared:
            if source is not None and end - begin in _READ_AHEAD_ROWS:
                # Only to fill the cache: read one value of each cache line.
                source[begin : end : max(1, _LINE_NBYTES // (abs(source.strides[0]) or 1))].max()
            for which, first, last in pieces:
                gather(rows_of[which][first:last], outs[which][first:last])


def _blocks(
    rows_of: Sequence[Rows], n_rows: int, ascending: bool
) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Yield the start and end of each block of rows, with its part of each selection."""
    edges = [*range(0, n_rows, BLOCK_ROWS), n_rows]
    n_pieces = len(rows_of) * (len(edges) - 1)
    if not ascending or len(edges) <= 2 or n_pieces * LEAST_PIECE_ROWS > sum(map(len, rows_of)):
        yield 0, n_rows, [(which, 0, len(rows)) for which, rows in enumerate(rows_of)]
        return
    cuts = [np.searchsorted(rows, edges).tolist() for rows in rows_of]
    for number, (begin, end) in enumerate(pairwise(edges)):
        pieces = [(which, cut[number], cut[number + 1]) for which, cut in enumerate(cuts)]
        yield begin, end, [piece for piece in pieces if piece[1] < piece[2]]


def _prepared(values: Values, outs: Sequence[npt.NDArray[Any]]) -> _Prepared:
    """Return the gather function of a column, the array to read ahead, and the output arrays."""
    if isinstance(values, RowCounts):
        return partial(_count, values), None, outs
    kernel = _kernels().take.get(values.dtype.itemsize)
    if kernel is None or not values.dtype.isnative or values.dtype.kind == "V":
        # mode="clip" writes directly into `out`; the default mode uses a temporary.
        return lambda rows, out: np.take(values, rows, out=out, mode="clip"), None, outs
    carrier = _CARRIER[values.dtype.itemsize]
    source = values.view(carrier)

    def gather(rows: Rows, out: npt.NDArray[Any]) -> None:
        kernel(source, rows, out, 0)

    return gather, source, [out.view(carrier) for out in outs]


def _count(values: RowCounts, rows: Rows, out: npt.NDArray[Any]) -> None:
    if values.step == 1:
        np.add(rows, values.start, out=out)
    else:
        np.multiply(rows, values.step, out=out)
        out += values.start


def slots_by_table(xp: Any, numbers: Any, slot_table: npt.NDArray[np.intp]) -> Any:
    """Return the slot of each row for integer partition numbers in device memory.

    Parameters
    ----------
    xp
        The array library: NumPy, or a device library with the same names.
    numbers
        Partition number of each row.
    slot_table
        As in `Slots`.

    Returns
    -------
    array of int32
    """
    table = xp.asarray(slot_table.astype(np.int32))
    last = len(slot_table) - 1
    # Numbers beyond 63 bits become negative, and negative numbers are no partitions either.
    codes = numbers.astype(np.int64)
    return table[xp.where((codes < 0) | (codes > last), last, codes)]
