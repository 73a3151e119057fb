"""Row grouping and gathering: the two inner loops of a partition step.

Covers the kernels that touch every byte of a frame on its way out: a counting sort of partition
numbers, and a gather of columns' rows into memory the caller owns. Does not know what a
column means (`frames.columns`) nor where rows go (`shuffle.plan`).

pandas carries the fastest kernels for both that do not need a compiler of ours, but not in its
public interface. They are looked up here, once, and NumPy stands in where they are missing: same
results, about a third of the speed for the sort and half for the gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]
_Gather = Callable[[Rows, npt.NDArray[Any]], object]
_Prepared = tuple[_Gather, npt.NDArray[Any] | None, Sequence[npt.NDArray[Any]]]

try:
    from pandas._libs import algos as _algos
except ImportError:  # pragma: no cover - every pandas so far has it
    _algos = None  # type: ignore[assignment]

#: Rows of a block of a column: of eight bytes each they take 2 MiB, well within the last cache.
BLOCK_ROWS = 1 << 18
#: Blocks are used where this many rows of one go into a selection: each such piece is a call.
LEAST_PIECE_ROWS = 1 << 11
#: Fewer rows are in a nearer cache as likely as not, and more do not stay in any.
_READ_AHEAD_ROWS = range(1 << 14, 1 << 20)
_LINE_NBYTES = 64

#: The signed integer that stands for any value of that many bytes while it is moved.
_CARRIER = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def _pandas_kernels() -> dict[int, Callable[..., None]]:
    found = {}
    for itemsize, carrier in _CARRIER.items():
        name = np.dtype(carrier).name
        kernel = getattr(_algos, f"take_1d_{name}_{name}", None)
        if kernel is not None:
            found[itemsize] = kernel
    return found


_TAKE = _pandas_kernels()
_GROUPSORT = getattr(_algos, "groupsort_indexer", None)


def group_rows(slots: Rows, n_slots: int) -> tuple[Rows, Rows]:
    """Order rows by slot, keeping their order inside each.

    Parameters
    ----------
    slots
        Slot of each row; -1 for a row nobody wants.
    n_slots
        Number of slots; every entry of `slots` is below it.

    Returns
    -------
    rows, offsets
        `rows[offsets[s]:offsets[s + 1]]` are the row numbers of slot `s`, ascending.
    """
    offsets = np.zeros(n_slots + 1, dtype=np.intp)
    if _GROUPSORT is not None:
        rows, counts = _GROUPSORT(slots, n_slots)
        np.cumsum(counts[1:], out=offsets[1:])
        return rows[counts[0] :], offsets
    wanted = np.flatnonzero(slots >= 0)
    kept = slots[wanted]
    # NumPy sorts 16-bit integers by radix, wider ones by comparison.
    narrow = kept.astype(np.uint16) if n_slots <= 1 << 16 else kept
    rows = wanted[np.argsort(narrow, kind="stable")]
    np.cumsum(np.bincount(kept, minlength=n_slots), out=offsets[1:])
    return rows, offsets


class Counting:
    """Values `start + step * row`, never written down: what most indexes are."""

    dtype = np.dtype(np.int64)

    def __init__(self, start: int, step: int) -> None:
        self.start = start
        self.step = step


Values = npt.NDArray[Any] | Counting


def gather_into(values: Values, rows: Rows, out: npt.NDArray[Any]) -> None:
    """Write `values[rows]` into `out`, both one-dimensional and of one dtype."""
    gather, _, (out,) = _prepared(values, [out])
    gather(rows, out)


def gather_columns(
    columns: Iterable[tuple[Values, Sequence[npt.NDArray[Any]]]],
    rows_of: Sequence[Rows],
    n_rows: int,
    *,
    ascending: bool = False,
) -> None:
    """Write `values[rows]` into `out`, for each column and each of several selections of rows.

    Rows that go to one of many places are far apart, and memory is slow to answer who asks for a
    line here and a line there. So a column is read through once, which it is quick at, and gathered
    from while the processor's cache has it: of a column that is longer than the cache a block of
    rows at a time, if that does not make pieces too small.

    Parameters
    ----------
    columns
        Values, and memory for each selection.
    rows_of
        Numbers of the rows of each selection.
    n_rows
        Length of the columns.
    ascending
        Whether the numbers of each selection ascend. Only then are there blocks.
    """
    blocks = list(_blocks(rows_of, n_rows, ascending))
    prepared: Iterable[_Prepared] = (_prepared(values, outs) for values, outs in columns)
    if len(blocks) > 1:
        # What is prepared takes memory, which adds up where there are thousands of columns.
        prepared = list(prepared)
    for begin, end, pieces in blocks:
        for gather, source, outs in prepared:
            if source is not None and end - begin in _READ_AHEAD_ROWS:
                # For the cache alone: a value of each line.
                source[begin : end : max(1, _LINE_NBYTES // (abs(source.strides[0]) or 1))].max()
            for which, first, last in pieces:
                gather(rows_of[which][first:last], outs[which][first:last])


def _blocks(
    rows_of: Sequence[Rows], n_rows: int, ascending: bool
) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """Begin and end of each block of rows, and which part of which selection is in it."""
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
    """What gathers from a column, what of it is worth being read ahead, and where to write."""
    if isinstance(values, Counting):
        return partial(_count, values), None, outs
    kernel = _TAKE.get(values.dtype.itemsize)
    if kernel is None or not values.dtype.isnative or values.dtype.kind == "V":
        # "clip" writes straight into `out`; the default mode goes through a temporary.
        return lambda rows, out: np.take(values, rows, out=out, mode="clip"), None, outs
    carrier = _CARRIER[values.dtype.itemsize]
    source = values.view(carrier)

    def gather(rows: Rows, out: npt.NDArray[Any]) -> None:
        kernel(source, rows, out, 0)

    return gather, source, [out.view(carrier) for out in outs]


def _count(values: Counting, rows: Rows, out: npt.NDArray[Any]) -> None:
    if values.step == 1:
        np.add(rows, values.start, out=out)
    else:
        np.multiply(rows, values.step, out=out)
        out += values.start


def slots_by_table(xp: Any, numbers: Any, slot_table: npt.NDArray[np.intp]) -> Any:
    """Slot of each row, where the numbers of partitions are integers in memory of a device.

    Parameters
    ----------
    xp
        The array library: NumPy, or one that has its names for arrays on a device.
    numbers
        Partition of each row.
    slot_table
        As of `Slots`.

    Returns
    -------
    array of int32
    """
    table = xp.asarray(slot_table.astype(np.int32))
    last = len(slot_table) - 1
    # Numbers beyond 63 bits become negative, which are no partitions either.
    codes = numbers.astype(np.int64)
    return table[xp.where((codes < 0) | (codes > last), last, codes)]
