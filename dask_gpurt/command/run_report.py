"""The closing report of `dask gpurt run` and of `dask_gpurt.progress`, as text and as JSON.

It formats a `CounterSnapshot` and makes no calls. Phrases that other commands share are here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask.utils import format_bytes

import dask_gpurt
from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.judge import verdict
from dask_gpurt.command.observe import CounterSnapshot


def as_dict(
    snapshot: CounterSnapshot,
    wall_s: float,
    exit_code: int,
    notes: list[str],
    cluster_start_s: float = 0.0,
) -> dict[str, Any]:
    """Return the report as `--report` writes it.

    Parameters
    ----------
    cluster_start_s
        The part of `wall_s` in which the cluster for the program started.
    """
    return {
        "dask_gpurt": dask_gpurt.__version__,
        "exit_code": exit_code,
        "wall_s": round(wall_s, 3),
        "sent_nbytes": snapshot.totals["sent_nbytes"],
        "local_nbytes": snapshot.totals["local_nbytes"],
        # Values and shards, also those that stock Dask wrote.
        "spilled_nbytes": int(snapshot.spent.get("written_nbytes", 0)),
        "totals": snapshot.totals,
        "runs": snapshot.runs,
        "fallbacks": snapshot.fallbacks,
        "not_ready": snapshot.not_ready,
        "clusters": snapshot.clusters,
        "spent": snapshot.spent,
        "shuffles": snapshot.shuffles,
        "workers": snapshot.loads,
        "cluster_start_s": round(cluster_start_s, 3),
        "verdict": verdict.of_snapshot(snapshot, max(wall_s - cluster_start_s, 0.0)),
        "notes": notes,
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report as JSON."""
    path.write_text(to_json(report) + "\n", encoding="utf-8")


def as_text(report: dict[str, Any], width: int | None = None, *, with_verdict: bool = True) -> str:
    """Return the report as text for a terminal; its verdict wrapped at `width` if given."""
    seconds = f"dask gpurt: {report['wall_s']:.1f} s"
    lines = []
    if not report["clusters"]:
        lines.append(f"{seconds}; nothing ran on a cluster")
    else:
        lines += [seconds, *(f"  {name:<21}  {value}" for name, value in rows(report))]
    lines += [f"  {line}" for line in problems(report)]
    if report["clusters"] and with_verdict:
        lines += verdict.as_lines(report["verdict"]["text"], width)
    return "\n".join(lines)


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what moved, as names and values."""
    runs = report["runs"]
    # Shuffles of stock Dask move bytes, too, which nobody counts.
    by = " by dask_gpurt" if runs["stock"] else ""
    peak_nbytes = most_memory_nbytes(report)
    return [
        ("moved between workers", format_bytes(report["sent_nbytes"]) + by),
        ("stayed on its worker", format_bytes(report["local_nbytes"]) + by),
        ("spilled to disk", format_bytes(report["spilled_nbytes"])),
        ("shuffles", f"{runs['gpurt']} with dask_gpurt, {runs['stock']} with stock Dask"),
        *([("peak process memory", format_bytes(peak_nbytes))] if peak_nbytes else []),
    ]


def most_memory_nbytes(report: Mapping[str, Any]) -> int | None:
    """Return the most memory that the process of a worker took; None if that is not known.

    A worker that ended before the program did is not counted.
    """
    peaks: list[int | None] = [one.get("peak_nbytes") for one in report["workers"].values()]
    known = [one for one in peaks if one is not None]
    return max(known) if known and len(known) == len(peaks) else None


def problems(report: dict[str, Any]) -> list[str]:
    """Return why the runtime did not do everything, and the notes, a line each."""
    lines = []
    for cluster in report["clusters"]:
        if not cluster["active"]:
            why = cluster["reason"] or "no reason was given"
            lines.append(f"not active on {cluster['scheduler']}: {why}")
    for one in report["fallbacks"]:
        lines.append(f"stock Dask: {one['what']} ({times(one['count'])}): {one['why']}")
    named = {one["why"] for one in report["fallbacks"]}
    lines += [problem for problem in report["not_ready"].values() if problem not in named]
    return [*lines, *report["notes"]]


def device_note(device: Mapping[str, Any] | None) -> str | None:
    """Return which GPU values are not managed, and why; None if all are."""
    if device is None:
        return None
    if device["problem"] is not None:
        return f"Dask manages the values on the GPU: {device['problem']}"
    if device["cudf_spills"]:
        return "cuDF spills its own values: the store counts them, but does not move them"
    return None


def times(count: int) -> str:
    """Return `once`, or the number of times."""
    return "once" if count == 1 else f"{count} times"
