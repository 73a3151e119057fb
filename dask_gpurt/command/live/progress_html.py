"""HTML of what moves and of what has moved, for an output of a notebook. Pure.

Names of workers and reasons come from outside; `tables` escapes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dask.utils import format_bytes

from dask_gpurt.command import run_report
from dask_gpurt.plugins.dashboard import tables
from dask_gpurt.plugins.dashboard.overview import TIERS

#: Most workers that are shown; the others are summed.
MAX_WORKERS = 8


def running(seen: Mapping[str, Any], words: str) -> str:
    """Return the running shuffles, and what each worker holds.

    Parameters
    ----------
    seen
        The data of the dashboard's page, or a part of it; empty before the first reading.
    words
        What has moved so far.
    """
    title = f"dask_gpurt: {words}"
    if not seen.get("active", True):
        return tables.titled(title, tables.quiet(f"The runtime is off: {seen['reason']}"))
    if "shuffles" not in seen:
        return tables.titled(title, "")
    return tables.titled(title, _shuffles(seen["shuffles"]) + _workers(seen["workers"]))


def final(report: dict[str, Any]) -> str:
    """Return the sum of what moved, and why the runtime did not do everything."""
    rows = [(name, tables.Number(value)) for name, value in run_report.rows(report)]
    said = [*run_report.problems(report), *report["verdict"]["text"]]
    problems = "".join(map(tables.quiet, said))
    return tables.titled(
        f"dask_gpurt: {report['wall_s']:.1f} s", tables.table(("", ""), rows) + problems
    )


def phase(progress: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return what a shuffle does, and the share of its tasks that are done."""
    if progress is None:
        # The run has ended, or its tasks are forgotten.
        return "end", ""
    n_done = progress["inputs_done"] + progress["outputs_done"]
    n_tasks = progress["inputs"] + progress["outputs"]
    share = f"{100 * n_done // max(n_tasks, 1)}%"
    if progress["inputs_done"] < progress["inputs"]:
        return "cut and send", share
    if progress["outputs_done"] == progress["outputs"]:
        return "end", share
    if progress["is_delivered"]:
        return "assemble", share
    return "deliver", share


def _shuffles(shuffles: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (
            one["label"],
            one["kind"],
            *_phase_cells(one["progress"]),
            tables.Number(format_bytes(one["nbytes"])),
            tables.Number(format_bytes(one["sent_nbytes"])),
            tables.Number(f"{one['skew']:.2f}"),
        )
        for one in shuffles
        if one["is_open"]
    ]
    if not rows:
        return tables.quiet("No shuffle is running.")
    names = ("shuffle", "data", "phase", "done", "bytes", "to other workers", "skew")
    return tables.table(names, rows)


def _phase_cells(progress: Mapping[str, Any] | None) -> tuple[str, str]:
    name, share = phase(progress)
    return name, tables.Number(share)


def _workers(workers: Iterable[Mapping[str, Any]]) -> str:
    """Return a line for each worker that holds most, and one for the sum of the others."""
    fullest = sorted(workers, key=lambda one: -sum(one["tiers"].values()))
    shown, others = fullest[:MAX_WORKERS], fullest[MAX_WORKERS:]
    rows = [(one["name"], _tiers(one["tiers"])) for one in shown]
    if others:
        total: Counter[str] = Counter()
        for one in others:
            total.update(one["tiers"])
        rows.append((f"{len(others)} others", _tiers(total)))
    return tables.table(("worker", "holds"), rows)


def _tiers(tiers: Mapping[str, int]) -> str:
    found = [f"{format_bytes(tiers[name])} {text}" for name, text in TIERS.items() if tiers[name]]
    return ", ".join(found) or "nothing"
