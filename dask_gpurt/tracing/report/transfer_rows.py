"""Transfers by kind and link: bytes, busy seconds, rate, and share of what the link can carry.

Messages and fetches are counted by pair of hosts, other work by its path. A second counts once for
a row, however many transfers went on in it: the rate is that of the link while it was busy. Kinds
that are on one link at once share its rate; only `link_rows` has the rate of the link itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dask_gpurt.devices.ledger import COMMUNICATION, COMPUTE, WAITING
from dask_gpurt.tracing.lane_names import FETCH, PHASE
from dask_gpurt.tracing.report.busy_time import Column, busy_by_group
from dask_gpurt.tracing.report.event_columns import Columns
from dask_gpurt.tracing.report.task_stories import link_text

#: Way of copies between a device and memory that the system may move.
PAGEABLE = "pageable"
#: Kind of copies that a foreign trace of a device has.
COPY = "copy"
#: Stands for all ways together. A fetch does not say which way it took.
_ANY_WAY = "any"
#: Lanes that are no transfers: tasks and their parts. Messages and fetches have rows of their own.
_NOT_COPIES = frozenset({COMPUTE, PHASE, COMMUNICATION, FETCH})


class TransferRow(NamedTuple):
    """All transfers of one kind on one link.

    Attributes
    ----------
    kind
        `MESSAGE`, `FETCH`, or the name of the lane; of a whole link, the kind with most bytes.
    source, target
        The hosts; for other work the two parts of its path, of which the second may be empty.
    way
        The transport; for copies of a device, "pinned" or "pageable".
    n_processes
        Processes that moved the bytes, or sent them.
    is_hop
        The bytes went from one worker to another.
    busy_s
        Seconds in which at least one transfer went on. For copies, reads, writes and codecs: summed
        over processes, which have a lane each.
    rate
        Bytes a second while busy.
    bandwidth
        The most that the link can carry, in bytes a second; 0 if unknown.
    longest_busy_s
        Busy seconds of the busiest process.
    """

    kind: str
    source: str
    target: str
    way: str
    nbytes: float
    n_transfers: int
    n_processes: int
    busy_s: float
    rate: float
    bandwidth: float
    longest_busy_s: float
    is_hop: bool

    @property
    def mean_nbytes(self) -> float:
        return self.nbytes / self.n_transfers

    @property
    def share(self) -> float | None:
        """Return the rate as a share of what the link can carry."""
        return self.rate / self.bandwidth if self.bandwidth else None

    @property
    def is_network(self) -> bool:
        """Return whether the bytes went from one host to another."""
        return self.is_hop and self.source != self.target

    @property
    def link(self) -> str:
        """Return the name of the link."""
        if self.is_hop:
            return link_text(self.source, self.target)
        return f"{self.source} to {self.target}" if self.target else self.source


def transfer_rows(columns: Columns) -> list[TransferRow]:
    """Return a row for each kind and link, busiest first."""
    hops = columns.hops
    keys = np.stack([hops.kind, hops.source, hops.target, hops.way], axis=1)
    rows = [*_hop_rows(columns, keys), *_within_workers(columns)]
    return sorted(rows, key=lambda row: -row.busy_s)


def _bandwidths(columns: Columns) -> dict[tuple[str, str, str], float]:
    """Return what links can carry by source, target and way, and the most of all ways."""
    known: dict[tuple[str, str, str], float] = {}
    for one in columns.trace.links:
        for way in (one.way, _ANY_WAY):
            link = one.source, one.target, way
            known[link] = max(known.get(link, 0.0), one.bandwidth)
    return known


def _bandwidth(known: dict[tuple[str, str, str], float], *link: str) -> float:
    source, target, way = link
    found = known.get((source, target, way or _ANY_WAY))
    return found or known.get((source, target, ""), 0.0)


def link_rows(columns: Columns) -> list[TransferRow]:
    """Return a row for each pair of hosts, with all kinds of transfers together."""
    hops = columns.hops
    return _hop_rows(columns, np.stack([hops.source, hops.target], axis=1))


def _hop_rows(columns: Columns, keys: Column) -> list[TransferRow]:
    """Return a row for each distinct key. A row has the kind and the way with most of its bytes."""
    hops, ways = columns.hops, columns.work.ways
    bandwidths = _bandwidths(columns)
    moved = np.flatnonzero(hops.nbytes > 0)
    found, group = _groups(keys[moved])
    n = len(found)
    busy_s = busy_by_group(group, hops.start_s[moved], hops.wire_end_s[moved], n)
    counted = np.bincount(group, minlength=n)
    nbytes = np.bincount(group, hops.nbytes[moved], minlength=n)
    senders = _n_distinct(group, hops.sender[moved], n)
    kind = _heaviest(group, hops.kind[moved], hops.nbytes[moved], n)
    way = _heaviest(group, hops.way[moved], hops.nbytes[moved], n)
    _, first = np.unique(group, return_index=True)
    rows = []
    for i, hop in enumerate(moved[first].tolist()):
        ends = hops.hosts[hops.source[hop]], hops.hosts[hops.target[hop]]
        rows.append(
            TransferRow(
                hops.kinds[kind[i]],
                *ends,
                ways[way[i]],
                float(nbytes[i]),
                int(counted[i]),
                int(senders[i]),
                float(busy_s[i]),
                rate_of(nbytes[i], busy_s[i]),
                _bandwidth(bandwidths, *ends, ways[way[i]]),
                float(busy_s[i]),
                True,
            )
        )
    return rows


def _within_workers(columns: Columns) -> list[TransferRow]:
    work, bandwidths = columns.work, _bandwidths(columns)
    lanes = [i for i, lane in enumerate(work.lanes) if lane not in _NOT_COPIES]
    # A kernel, and a wait for another lane, move nothing.
    paths = [i for i, path in enumerate(work.paths) if path not in (COMPUTE, WAITING)]
    picked = np.flatnonzero(
        (work.nbytes > 0) & (work.peer < 0) & np.isin(work.lane, lanes) & np.isin(work.path, paths)
    )
    # All streams of a device copy over the same links.
    kinds = [*work.lanes, COPY]
    is_device = np.isin(work.process, columns.places.devices)
    kind = np.where(is_device, len(work.lanes), work.lane)
    keys = np.stack([kind, work.path, work.way, work.process], axis=1)[picked]
    by_process, group = _groups(keys)
    n = len(by_process)
    busy_s = busy_by_group(group, work.start_s[picked], work.end_s[picked], n)
    nbytes = np.bincount(group, work.nbytes[picked], minlength=n)
    counted = np.bincount(group, minlength=n)
    found, outer = _groups(by_process[:, :3])
    rows = []
    for i, (kind_number, path, way) in enumerate(found.tolist()):
        mine = outer == i
        source, _, target = work.paths[path].partition(" > ")
        total_s, total_nbytes = float(busy_s[mine].sum()), float(nbytes[mine].sum())
        rows.append(
            TransferRow(
                kinds[kind_number],
                source,
                target,
                work.ways[way],
                total_nbytes,
                int(counted[mine].sum()),
                int(mine.sum()),
                total_s,
                rate_of(total_nbytes, total_s),
                _bandwidth(bandwidths, source, target, work.ways[way]),
                float(busy_s[mine].max()),
                False,
            )
        )
    return rows


def _groups(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of a table, and the number of its distinct row for each row."""
    found, group = np.unique(keys, axis=0, return_inverse=True)
    return found, group.reshape(-1)


def _n_distinct(group: np.ndarray, value: np.ndarray, n_groups: int) -> np.ndarray:
    pairs = np.unique(np.stack([group, value], axis=1), axis=0)
    return np.bincount(pairs[:, 0], minlength=n_groups)


def _heaviest(group: Column, value: Column, nbytes: Column, n_groups: int) -> Column:
    """Return for each group the value with most bytes."""
    pairs, pair = _groups(np.stack([group, value], axis=1))
    order = np.argsort(np.bincount(pair, nbytes, minlength=len(pairs)), kind="stable")
    found = np.zeros(n_groups, dtype=value.dtype)
    # The last assignment to a group stays, and that is the one with most bytes.
    found[pairs[order, 0]] = pairs[order, 1]
    return found


def rate_of(nbytes: float, busy_s: float) -> float:
    """Return bytes a second; 0 if the time is too short to say."""
    return float(nbytes / busy_s) if busy_s > 1e-9 else 0.0
