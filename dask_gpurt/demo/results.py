"""Results of one run of the demo: plain data, with medians and ratios computed from it.

:mod:`dask_gpurt.demo.runner` fills it, and :mod:`dask_gpurt.demo.report` writes it to files. This
module neither measures nor draws.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import statistics
from dataclasses import dataclass, field
from typing import Any

from dask.system import CPU_COUNT
from distributed.system import MEMORY_LIMIT

#: Must increase when a key of :meth:`DemoReport.to_dict` changes its meaning or is removed.
REPORT_VERSION = 1

#: Ratios this close to 1 are within the noise of medians of the same code.
SAME_WITHIN = 0.05

#: The same for queries that were timed only once on each side.
SAME_WITHIN_ONCE = 0.20

#: Warning against drawing conclusions from single runs.
TIMED_ONCE = (
    f"For queries timed only once, up to {SAME_WITHIN_ONCE:.0%} counts as no clear difference, "
    "and more may still be chance."
)

_PACKAGES = ("dask", "distributed", "pandas", "pyarrow", "numpy", "duckdb", "dask-gpurt")


@dataclass
class Row:
    """One query, run on both clusters.

    Attributes
    ----------
    name, title, group
        "Q3", "shipping priority", "TPC-H".
    stock_s, enabled_s
        Wall seconds of each timed run, in the order of running.
    n_rows
        Length of the answer.
    warmed_up
        Whether each cluster ran the query once before it was timed.
    difference
        None if all answers agree, else a sentence on the first difference.
    stock_totals, enabled_totals
        Growth of each of the runtime's counters during the first timed run.
    """

    name: str
    title: str
    group: str
    stock_s: list[float] = field(default_factory=list)
    enabled_s: list[float] = field(default_factory=list)
    n_rows: int = 0
    warmed_up: bool = False
    difference: str | None = None
    stock_totals: dict[str, int] = field(default_factory=dict)
    enabled_totals: dict[str, int] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every answer was correct."""
        return self.difference is None

    @property
    def n_runs(self) -> int:
        """Number of timed runs on both sides."""
        return min(len(self.stock_s), len(self.enabled_s))

    @property
    def stock_median_s(self) -> float:
        """Median of the stock runs; NaN if none succeeded."""
        return statistics.median(self.stock_s) if self.stock_s else math.nan

    @property
    def enabled_median_s(self) -> float:
        """Median of the enabled runs; NaN if none succeeded."""
        return statistics.median(self.enabled_s) if self.enabled_s else math.nan

    @property
    def ratio(self) -> float:
        """Stock time over enabled time; above 1, the runtime was faster. NaN without both times."""
        enabled = self.enabled_median_s
        return self.stock_median_s / enabled if enabled > 0 else math.nan

    @property
    def verdict(self) -> str:
        """The ratio in one word: "faster", "slower", "same" or "none". See :func:`verdict`."""
        if self.n_runs > 1:
            # The median of the faster side must beat every run of the other. Otherwise the order of
            # the medians may be chance.
            beats = (
                self.enabled_median_s < min(self.stock_s),
                self.stock_median_s < min(self.enabled_s),
            )
            if not any(beats):
                return "same"
        return verdict(self.ratio, SAME_WITHIN if self.n_runs > 1 else SAME_WITHIN_ONCE)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data. Missing measurements are None."""
        return {
            "name": self.name,
            "title": self.title,
            "group": self.group,
            "n_rows": self.n_rows,
            "agrees": self.agrees,
            "difference": self.difference,
            "warmed_up": self.warmed_up,
            "stock_s": self.stock_s,
            "enabled_s": self.enabled_s,
            "stock_median_s": _or_none(self.stock_median_s),
            "enabled_median_s": _or_none(self.enabled_median_s),
            "ratio": _or_none(self.ratio),
            "verdict": self.verdict,
            "stock_totals": self.stock_totals,
            "enabled_totals": self.enabled_totals,
        }


@dataclass
class DemoReport:
    """All rows of one run, with the context needed to judge them.

    Attributes
    ----------
    rows
        One per query, in the order of running.
    machine
        See :func:`describe_machine`.
    settings
        Conditions of the measurement, such as workers and scale, for display.
    started
        ISO 8601 time in UTC.
    duration_s
        Wall seconds of the whole run, warm-ups and checks included.
    repeats
        Planned number of timed runs per query. A row may have fewer if time ran out.
    left_out
        Queries that were not run, because time ran out.
    """

    rows: list[Row]
    machine: dict[str, str]
    settings: dict[str, str]
    started: str
    duration_s: float
    repeats: int
    left_out: list[str] = field(default_factory=list)

    @property
    def left_out_sentence(self) -> str:
        """A sentence on the queries that were not run; empty if all were."""
        if not self.left_out:
            return ""
        n, names = len(self.left_out), ", ".join(self.left_out)
        return f"Time ran out before {n} of the queries. Run them with `--queries`: {names}."

    @property
    def agrees(self) -> bool:
        """Whether every answer of every query was correct."""
        return all(row.agrees for row in self.rows)

    @property
    def stock_total_s(self) -> float:
        """Sum of the stock medians over the queries with a time on both sides."""
        return sum(row.stock_median_s for row in self._timed)

    @property
    def enabled_total_s(self) -> float:
        """Sum of the enabled medians over the queries with a time on both sides."""
        return sum(row.enabled_median_s for row in self._timed)

    @property
    def total_ratio(self) -> float:
        """Ratio of the two sums; NaN if nothing was timed."""
        return self.stock_total_s / self.enabled_total_s if self._timed else math.nan

    @property
    def mean_ratio(self) -> float:
        """Geometric mean of the ratios, in which all queries have equal weight."""
        if not self._timed:
            return math.nan
        return statistics.geometric_mean(row.ratio for row in self._timed)

    @property
    def _timed(self) -> list[Row]:
        return [row for row in self.rows if not math.isnan(row.ratio)]

    @property
    def min_runs(self) -> int:
        """The smallest number of timed runs of any query on a side, without failed queries."""
        return min((row.n_runs for row in self._timed), default=0)

    def count(self, word: str) -> int:
        """Return the number of rows with the verdict ``word``."""
        return sum(row.verdict == word for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "report_version": REPORT_VERSION,
            "started": self.started,
            "duration_s": self.duration_s,
            "agrees": self.agrees,
            "repeats": self.repeats,
            "left_out": self.left_out,
            "machine": self.machine,
            "settings": self.settings,
            "totals": {
                "stock_s": self.stock_total_s,
                "enabled_s": self.enabled_total_s,
                "ratio": _or_none(self.total_ratio),
                "geometric_mean_ratio": _or_none(self.mean_ratio),
            },
            "queries": [row.to_dict() for row in self.rows],
        }


def verdict(ratio: float, same_within: float = SAME_WITHIN) -> str:
    """Return a ratio in one word.

    Parameters
    ----------
    ratio
        Stock time over enabled time.
    same_within
        Largest distance from 1 that means no difference.

    Returns
    -------
    str
        "faster" or "slower" for the runtime, "same" for no clear difference, "none" for NaN.
    """
    if math.isnan(ratio):
        return "none"
    if abs(ratio - 1) <= same_within:
        return "same"
    return "faster" if ratio > 1 else "slower"


def describe_machine() -> dict[str, str]:
    """Return facts about the machine that affect results: cores, memory, system and versions.

    Returns
    -------
    dict
        Names and values for display. Limits of a container count as the machine's.
    """
    described = {
        "cores": str(CPU_COUNT),
        "memory": format_nbytes(int(MEMORY_LIMIT)),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            described[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {name: value for name, value in described.items() if value}


def _processor() -> str:
    """Return the processor's model, or an empty string if unknown."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor()


def format_nbytes(nbytes: int) -> str:
    """Return a size with a unit in powers of 1000, such as "3.1 MB"."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _or_none(value: float) -> float | None:
    """Return None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value
