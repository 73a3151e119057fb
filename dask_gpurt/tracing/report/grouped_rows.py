"""Rows of a table by a group, ready to be asked for many times."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from dask_gpurt.tracing.report.busy_time import Column


class GroupedRows:
    """Rows of a table by a group, in order of a time if one is given.

    Parameters
    ----------
    group
        The group of each row.
    rows
        The rows to keep. Default: all.
    times_s
        Rows of a group are ordered by it.
    labels
        Values to return instead of the rows, if `group` has one for each of them.
    """

    def __init__(
        self,
        group: Column,
        rows: Column | None = None,
        times_s: Column | None = None,
        labels: Column | None = None,
    ) -> None:
        rows = np.arange(len(group)) if rows is None else rows
        keys = (group[rows],) if times_s is None else (times_s[rows], group[rows])
        order = np.lexsort(keys)
        groups = group[rows][order]
        self._rows = rows[order] if labels is None else labels[rows[order]]
        self._times_s = [] if times_s is None else times_s[self._rows].tolist()
        names, first = np.unique(groups, return_index=True)
        ends = np.append(first[1:], len(groups))[: len(first)]
        bounds = zip(first.tolist(), ends.tolist(), strict=True)
        self._bounds = dict(zip(names.tolist(), bounds, strict=True))

    def __getitem__(self, group: int) -> Column:
        start, end = self._bounds.get(group, (0, 0))
        return self._rows[start:end]

    def items(self) -> Iterable[tuple[int, Column]]:
        return ((group, self[group]) for group in self._bounds)

    def within(self, group: int, start_s: float, end_s: float) -> Column:
        """Return the rows of a group whose time is in a period, in order."""
        first, last = self._bounds.get(group, (0, 0))
        a = bisect.bisect_left(self._times_s, start_s, first, last)
        b = bisect.bisect_left(self._times_s, end_s, a, last)
        return self._rows[a:b]
