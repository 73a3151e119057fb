"""Figures of a program or a cluster from which `tracing.live_rules` finds what limits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class LiveFacts:
    """Figures of a program, or of a cluster, for the rules.

    Attributes
    ----------
    shuffles
        `RunSum.summary` of each run on the runtime.
    runs
        Number of shuffles on the runtime (`gpurt`) and on stock Dask (`stock`).
    fallbacks
        What was left to stock Dask, and why.
    spent
        Seconds and bytes of all workers, and of the scheduler (`metrics.SPENT`).
    busy_s
        By address of a worker: seconds of its tasks over its threads.
    slowness
        By address of a worker: how many times as long as others it takes for the same tasks; 1 if
        as long, or if it is unknown.
    n_threads, n_cores
        Threads of all workers, and processors of their hosts; 0 if unknown.
    wall_s
        Length of the period; None if the period has no known start.
    method
        `dataframe.shuffle.method` of the program; empty if it is not set.
    shuffle_memory
        `gpurt.shuffle.memory` of the program; None if it is unknown.
    """

    shuffles: Sequence[Mapping[str, Any]] = ()
    runs: Mapping[str, int] = field(default_factory=Counter)
    fallbacks: Sequence[Mapping[str, Any]] = ()
    spent: Mapping[str, float] = field(default_factory=Counter)
    busy_s: Mapping[str, float] = field(default_factory=dict)
    slowness: Mapping[str, float] = field(default_factory=dict)
    n_threads: int = 0
    n_cores: int = 0
    wall_s: float | None = None
    method: str = ""
    shuffle_memory: object = None

    @cached_property
    def lost(self) -> list[Mapping[str, Any]]:
        """Attempts at shuffles that did not count, as a worker left."""
        last: dict[str, int] = {}
        for one in self.shuffles:
            last[one["id"]] = max(last.get(one["id"], 0), one["run"])
        # A program that computes the same thing again has runs with all of their outputs.
        return [
            one
            for one in self.shuffles
            if one["run"] < last[one["id"]] and one["outputs"] < max(one["partitions_out"], 1)
        ]

    @cached_property
    def counting(self) -> list[Mapping[str, Any]]:
        """All other attempts. The figures of lost ones lack those of workers that left."""
        lost = self.lost
        return [one for one in self.shuffles if one not in lost]

    @property
    def threads(self) -> int:
        """The number of threads that share the seconds of tasks; at least 1."""
        return max(self.n_threads, *(int(one["threads"]) for one in self.shuffles), 1)

    @property
    def period_s(self) -> float:
        """The length of the period, or the least that it can be."""
        if self.wall_s is not None:
            return self.wall_s
        lasted_s = sum(one["lasted_s"] for one in self.shuffles)
        return float(max(lasted_s, self.spent["task_s"] / self.threads))

    @property
    def working_s(self) -> float:
        """Seconds of tasks that did not wait."""
        waits = ("held_back_s", "disk_s", "room_s")
        return self.spent["task_s"] - sum(self.spent[name] for name in waits)
