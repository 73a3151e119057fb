"""The size of a worker's report: what it lists, and what it only counts.

A cluster of 1,000 workers has a million links, and a worker decides on codecs for each of its own.
So each worker lists as many entries as the scheduler asks for: the more workers, the fewer. It
sends a run that ended with two heartbeats, not in each report. `shuffle.tally` adds up what
arrives.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from dask_gpurt.shuffle.tally import MAX_RUNS

#: Entries of each list in the reports of all workers together, and least in each of them.
MAX_ENTRIES = 2_000
MIN_ENTRIES = 2
#: A link counts as this many entries, and so does a decision on a codec: each peer may have one.
PEER_ENTRIES = 4
#: Most groups of peers. Peers of further groups are counted by path alone.
MAX_GROUPS = 4


def most_entries(n_workers: int) -> int:
    """Return the most entries of a list in the report of one of so many workers."""
    return max(MIN_ENTRIES, MAX_ENTRIES // max(n_workers, 1))


def peers_by_path(links: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the number of `peers` for each `path` and `why_not`, the most peers first."""
    groups = Counter((one["path"], tuple(sorted(one["why_not"].items()))) for one in links.values())
    ordered = groups.most_common()
    others: Counter[str] = Counter()
    for (path, _), n in ordered[MAX_GROUPS:]:
        others[path] += n
    return [
        {"path": path, "why_not": dict(why_not), "peers": n}
        for (path, why_not), n in [
            *ordered[:MAX_GROUPS],
            *(((path, ()), n) for path, n in others.items()),
        ]
    ]


def limited(
    links: Mapping[str, Mapping[str, Any]], codecs: Sequence[Any], most: int
) -> dict[str, Any]:
    """Return the part of a report that would have an entry for each peer, with `most` in each list.

    Parameters
    ----------
    codecs
        Decisions on codecs. Those on the largest sections are kept.
    """
    most //= PEER_ENTRIES
    kept = sorted(codecs, key=lambda one: -one.nbytes)[:most]
    return {
        "links": dict([*links.items()][:most]),
        "paths": peers_by_path(links),
        "codecs": [decision.to_plain() for decision in kept],
        "left_out": {"links": max(0, len(links) - most), "codecs": len(codecs) - len(kept)},
    }


class RunReports:
    """Reports of the runs that ended on a worker, until the scheduler has them."""

    def __init__(self) -> None:
        self._past: deque[dict[str, Any]] = deque(maxlen=MAX_RUNS)
        self._untold: deque[dict[str, Any]] = deque(maxlen=MAX_RUNS)
        #: Sent with the last heartbeat, which may still be on its way, or be lost.
        self._told_once: list[dict[str, Any]] = []

    def ended(self, report: dict[str, Any]) -> None:
        self._past.append(report)
        self._untold.append(report)

    def for_heartbeat(self) -> list[dict[str, Any]]:
        """Return the reports to send with this heartbeat. Each is sent with two."""
        found = self.unsure()
        self._told_once = [*self._untold]
        self._untold.clear()
        return found

    def unsure(self) -> list[dict[str, Any]]:
        """Return the reports that the scheduler may not have yet, oldest first."""
        return [*self._told_once, *self._untold]

    def past(self) -> list[dict[str, Any]]:
        return [*self._past]

    def clear(self) -> None:
        for reports in (self._past, self._untold, self._told_once):
            reports.clear()
