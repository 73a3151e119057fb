"""The parts of a report together, for the rules that look for bottlenecks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask_gpurt.tracing.report.critical_path import CriticalPath
from dask_gpurt.tracing.report.event_columns import Columns
from dask_gpurt.tracing.report.host_rows import HostRow
from dask_gpurt.tracing.report.idle_gaps import IdleGaps
from dask_gpurt.tracing.report.task_rows import TaskRow
from dask_gpurt.tracing.report.task_stories import NETWORK
from dask_gpurt.tracing.report.transfer_rows import TransferRow, link_rows
from dask_gpurt.tracing.report.worker_rows import WorkerRow

#: A rule is silent if its change could save a smaller share of the time.
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Findings:
    """All tables of a report, and the columns that they were made from."""

    columns: Columns
    path: CriticalPath
    transfers: list[TransferRow]
    hosts: list[HostRow]
    workers: list[WorkerRow]
    tasks: list[TaskRow]
    gaps: IdleGaps

    @property
    def wall_s(self) -> float:
        return self.columns.wall_s

    @property
    def shuffle_memory(self) -> object:
        """The setting `gpurt.shuffle.memory` of the traced program; None if it is unknown."""
        settings = self.columns.trace.about.get("gpurt")
        shuffle = settings.get("shuffle") if isinstance(settings, dict) else None
        return shuffle.get("memory") if isinstance(shuffle, dict) else None

    @property
    def n_threads(self) -> int:
        """Return the threads of all workers."""
        return sum(one.n_threads for one in self.workers)

    @property
    def busy_share(self) -> float:
        """Return the share of the time of all threads in which they ran tasks."""
        had_s = sum(one.had_s for one in self.workers)
        return sum(one.task_s for one in self.workers) / had_s if had_s else 0.0

    @functools.cached_property
    def network_s(self) -> dict[str, float]:
        """Return the seconds that the critical path waited for each link, by its name."""
        return {part.where: part.seconds for part in self.path.parts if part.kind == NETWORK}

    @functools.cached_property
    def links(self) -> dict[str, TransferRow]:
        """Return for each pair of hosts the row of all that their link carried, by its name.

        There may be ten thousands of pairs.
        """
        return {one.link: one for one in link_rows(self.columns) if one.is_network and one.rate}

    def is_worth(self, saves_s: float) -> bool:
        """Return whether a change that saves `saves_s` is worth it."""
        return saves_s > 0 and saves_s >= _LEAST_SHARE * self.wall_s

    def setting(self, name: str) -> Any:
        """Return a setting of the traced cluster by its full name; None if it is not known."""
        return _found(self.columns.trace.about, name)


def _found(about: Mapping[str, Any], name: str) -> Any:
    if name in about:
        return about[name]
    first, _, rest = name.partition(".")
    for key in (first, "settings", "config"):
        inner = about.get(key)
        if isinstance(inner, Mapping):
            found = _found(inner, rest if key == first and rest else name)
            if found is not None:
                return found
    return None
