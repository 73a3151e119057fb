"""The verdict of `status`, `run` and `dask_gpurt.progress`: what limited this, and what helps.

`tracing.live_verdict` chooses among what rules find. This module takes their figures from a status
or a snapshot, and returns the verdict as plain values and as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import dask.config

from dask_gpurt import config
from dask_gpurt.command.layout import wrapped
from dask_gpurt.command.observe import CounterSnapshot
from dask_gpurt.metrics import SPENT
from dask_gpurt.tracing.live_facts import LiveFacts
from dask_gpurt.tracing.live_verdict import bottlenecks, verdict_lines

#: The verdict where nothing was measured.
_NONE: dict[str, Any] = {"bottlenecks": [], "text": []}


def of_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict on a cluster since the runtime was switched on; none if it is off."""
    if not status["active"]:
        return _NONE
    loads = {address: report["load"] for address, report in status["workers"].items() if report}
    n_threads, n_cores = cluster_size(loads)
    return _verdict(
        LiveFacts(
            shuffles=status["shuffles"],
            runs=status["runs"],
            fallbacks=status["fallbacks"],
            spent=_complete(status["spent"]),
            busy_s=_busy_s(loads),
            slowness=_slowness(loads),
            n_threads=n_threads,
            n_cores=n_cores,
        )
    )


def of_snapshot(snapshot: CounterSnapshot, wall_s: float) -> dict[str, Any]:
    """Return the verdict on a program that took `wall_s`; none if it was not measured."""
    is_active = any(one["active"] for one in snapshot.clusters)
    if not is_active and not snapshot.spent.get("task_s"):
        return _NONE
    _, n_cores = cluster_size(snapshot.loads)
    return _verdict(
        LiveFacts(
            shuffles=snapshot.shuffles,
            runs=snapshot.runs,
            fallbacks=snapshot.fallbacks,
            spent=_complete(snapshot.spent),
            busy_s=_busy_s(snapshot.loads),
            slowness=_slowness(snapshot.loads),
            n_threads=snapshot.n_threads,
            n_cores=n_cores,
            wall_s=wall_s,
            method=str(dask.config.get("dataframe.shuffle.method", None) or ""),
            shuffle_memory=config.shuffle_memory(),
        )
    )


def cluster_size(loads: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """Return the threads of workers and the processors of their hosts, by address of a worker."""
    from distributed.comm import get_address_host

    cores: dict[str, int] = {}
    for address, load in loads.items():
        host = get_address_host(address)
        cores[host] = max(cores.get(host, 0), load["cores"])
    return sum(load["threads"] for load in loads.values()), sum(cores.values())


def _complete(spent: Mapping[str, float]) -> dict[str, float]:
    return {name: float(spent.get(name, 0.0)) for name in SPENT}


def _busy_s(loads: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {address: load["task_s"] / max(load["threads"], 1) for address, load in loads.items()}


def _slowness(loads: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    # Only slow workers have it, and without the runtime nobody learns it.
    return {address: load.get("slowness", 1.0) for address, load in loads.items()}


def _verdict(facts: LiveFacts) -> dict[str, Any]:
    """Return `bottlenecks` and `text`, the paragraphs of the verdict."""
    found = bottlenecks(facts)
    return {
        "bottlenecks": [asdict(one) for one in found],
        "text": verdict_lines(found, facts),
    }


def as_lines(text: Sequence[str], width: int | None = None, indent: str = "  ") -> list[str]:
    """Return the paragraphs of a verdict as lines of a report."""
    return [line for one in text for line in wrapped(one, width, indent, indent + "  ")]
