"""Merging of many small shards into few, ordered by output partition.

Small inputs make small shards, each with a few rows for very many output partitions. Each such
piece costs time in Python when its output is assembled. A spilled shard would be read once for each
piece. A merge gathers the rows of many shards anew, ordered by slot and then by source, and cuts
them into shards of the usual size. So the rows of an output partition are close together in memory
and on disk, and are freed once it was read.

A merge writes each row once more, at about the speed of the first gather. `shuffle.shards` says
when to merge. This module chooses the shards and makes the new ones; the adapter moves the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import Merge, Selection
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES, cut_shards
from dask_gpurt.shuffle.shard import Origins, Shard

#: Least bytes of shards to merge together. While they are merged, they take twice the memory.
MERGED_NBYTES = 32 << 20
#: Size of merged shards that may be spilled. They should have one slot each: a slot reads all
#: shards with rows of it, and they may be evicted before the next slot.
SPILLED_NBYTES = 64 << 10
#: Smaller pieces are merged before outputs are assembled. To assemble a piece costs about 2 us,
#: whatever its size, and a merge handles 4 KiB in that time.
SMALL_PIECE_NBYTES = 4 << 10
#: Groups with fewer pieces are not worth a merge, which takes a millisecond at least.
LEAST_PIECES = 2_000

#: Returns memory for a shard that begins at a slot.
EmptyAt = Callable[[int, int], npt.NDArray[np.uint8]]
#: Counts the pieces that outputs are assembled from.
CountPieces = Callable[[Shard], int]


def count_slots(shard: Shard) -> int:
    """Return the number of pieces of a shard whose rows of a slot belong together."""
    return shard.n_unreleased


def count_runs(shard: Shard) -> int:
    """Return the number of pieces of a shard if rows of other shards belong between its runs."""
    return shard.n_unreleased if shard.origins is None else len(shard.origins.slot)


def has_small_pieces(shard: Shard, n_pieces: CountPieces) -> bool:
    """Return whether the pieces of a shard cost more time one by one than in a merge."""
    return shard.nbytes < SMALL_PIECE_NBYTES * n_pieces(shard)


def would_be_read_again(shard: Shard, n_pieces: CountPieces, most_pieces: float) -> bool:
    """Return whether a spilled shard would be read for a piece, evicted, and read for the next one.

    Parameters
    ----------
    most_pieces
        If all shards have at most as many pieces, those with rows of one slot fit into memory.
    """
    n = n_pieces(shard)
    return n > 1 and (n > most_pieces or shard.nbytes < SHARD_TARGET_NBYTES // 2)


def groups(
    shards: Iterable[Shard],
    is_small: Callable[[Shard, CountPieces], bool],
    least_pieces: int = LEAST_PIECES,
    n_pieces: CountPieces = count_slots,
    nbytes: int = 0,
) -> list[list[Shard]]:
    """Return groups of shards to merge, in the order of their sources.

    Shards that are on disk or merged already are left out, and divide groups.

    Parameters
    ----------
    nbytes
        Bytes of a group, if more than usual. The larger it is, the fewer slots a merged shard has.
    """
    found: list[list[Shard]] = [[]]
    most_nbytes, of_group_nbytes = max(nbytes, MERGED_NBYTES), 0
    for shard in sorted(shards, key=lambda one: (one.source, one.first_slot)):
        group = found[-1]
        is_new = shard.on_disk is None and not shard.is_merged
        fits = shard.is_resident and is_new and is_small(shard, n_pieces)
        if not fits or (
            group
            and (
                shard.layout_key != group[-1].layout_key
                or of_group_nbytes + shard.nbytes > most_nbytes
            )
        ):
            found.append([])
            of_group_nbytes = 0
        if fits:
            found[-1].append(shard)
            of_group_nbytes += shard.nbytes
    return [
        group for group in found if len(group) > 1 and sum(map(n_pieces, group)) >= least_pieces
    ]


def merged(
    group: Sequence[Shard],
    bodies: Sequence[Any],
    merge: Merge,
    empty_at: EmptyAt,
    target_nbytes: int = SHARD_TARGET_NBYTES,
) -> list[Shard]:
    """Return the shards that replace a group.

    Parameters
    ----------
    group
        Shards of one layout.
    bodies
        Their bodies.
    target_nbytes
        Usual size of the new shards.
    """
    first = min(shard.first_slot for shard in group)
    n_slots = max(shard.end_slot for shard in group) - first
    origins, starts = _origins(group)
    rows = _ranges(starts, origins.n_rows)
    before = np.zeros(n_slots + 1, dtype=np.int64)
    np.cumsum(np.bincount(origins.slot - first, origins.n_rows, n_slots), out=before[1:])
    row_nbytes = sum(shard.nbytes for shard in group) / max(len(rows), 1)
    cuts = cut_shards(before, row_nbytes, target_nbytes)
    selections = [
        Selection(rows[before[a] : before[b]], False, partial(_empty, empty_at, first + a))
        for a, b in cuts
    ]
    made = []
    for (a, b), body in zip(cuts, merge(bodies, selections), strict=True):
        x, y = np.searchsorted(origins.slot, (first + a, first + b))
        made.append(
            Shard(
                source=group[0].source,
                attempt=0,
                number=0,
                count=1,
                first_slot=first + a,
                rows_per_slot=np.diff(before[a : b + 1]).astype(np.uint32),
                layout_key=group[0].layout_key,
                body=body,
                origins=Origins(
                    origins.slot[x:y], origins.source[x:y], origins.n_rows[x:y], origins.batch
                ),
                is_merged=True,
            )
        )
    return made


def _origins(group: Sequence[Shard]) -> tuple[Origins, npt.NDArray[np.int64]]:
    """Return the origins of all rows, by slot and then by source, and where each run begins."""
    runs = [shard.runs() for shard in group]
    slot, source, n_rows = (np.concatenate(part) for part in zip(*runs, strict=True))
    starts = np.cumsum(n_rows) - n_rows
    # The last key counts most. Equal ones keep their order.
    order = np.lexsort((source, slot))
    return Origins(slot[order], source[order], n_rows[order], object()), starts[order]


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Return the numbers of these ranges, one after the other."""
    ends = np.cumsum(lengths)
    numbers = np.repeat(starts - (ends - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def _empty(empty_at: EmptyAt, slot: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return empty_at(nbytes, slot)
