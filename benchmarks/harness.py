"""Two clusters of real processes, one stock and one with the runtime on, timed in turns.

A single time means little on a shared machine, so the figure to read is the ratio of medians. Noise
is kept low as follows:

- Both clusters live for the whole run, with the inputs in their memory.
- Each workload runs once untimed on both sides. Then stock and enabled take turns, and the side
  that goes first alternates.
- Before each run, data that waits for the disk is written, because stock shuffles through files.
  Workers also get time to free memory. Otherwise the next run, of the other side, would pay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import dask
import distributed
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
from distributed import Client, LocalCluster, wait

import dask_gpurt

#: Pause after each run, because workers do not report when they have freed their memory.
REST_S = 2.0


@dataclass
class Timing:
    """Seconds of each timed run of one workload on both sides."""

    name: str
    nbytes: int
    stock_s: list[float] = field(default_factory=list)
    enabled_s: list[float] = field(default_factory=list)
    floor_s: list[float] = field(default_factory=list)
    target: float | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.stock_s) / statistics.median(self.enabled_s)

    def line(self) -> str:
        stock, enabled = statistics.median(self.stock_s), statistics.median(self.enabled_s)
        rate = self.nbytes / enabled / 1e6
        text = f"{self.name:42} stock {stock:7.3f} s  gpurt {enabled:7.3f} s ({rate:6.0f} MB/s)"
        text += f"  ratio {self.ratio:5.2f}"
        if self.target is not None:
            text += f" (at least {self.target:g})"
        if self.floor_s:
            text += f"  floor {statistics.median(self.floor_s):.3f} s"
        return text


@dataclass
class Sides:
    stock: Client
    enabled: Client

    def both(self) -> tuple[tuple[str, Client], tuple[str, Client]]:
        return ("stock", self.stock), ("enabled", self.enabled)


def in_turns(
    sides: Sides, repeats: int, once: Callable[[str, Client], dict[str, Any]], name: str = ""
) -> tuple[dict[str, list[dict[str, Any]]], dict[tuple[str, str], float]]:
    """Let both sides take turns; return all figures of each run, and their medians.

    The first turn is not counted.

    Parameters
    ----------
    once
        Does the work on a side, and returns its figures.
    name
        Stands before the progress.
    """
    runs: dict[str, list[dict[str, Any]]] = {"stock": [], "enabled": []}
    order = list(sides.both())
    for repeat in range(repeats + 1):
        for side, client in order:
            run = once(side, client)
            if repeat:
                runs[side].append(run)
        order.reverse()
        print(f"  {name}{repeat}/{repeats}", file=sys.stderr, flush=True)
    medians = {
        (side, figure): statistics.median(run[figure] for run in found)
        for side, found in runs.items()
        for figure in (found[0] if found else ())
    }
    return runs, medians


@contextlib.contextmanager
def stock_client(n_workers: int = 2, memory_limit: str | int = "auto") -> Iterator[Client]:
    """Start a stock cluster of one-thread worker processes over TCP; not the default client."""
    with dask.config.set({"gpurt.enabled": False}):
        cluster = LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            memory_limit=memory_limit,
            processes=True,
            dashboard_address=":0",
            silence_logs=50,
        )
        client = Client(cluster, set_as_default=False)
    with cluster, client:
        yield client


@contextlib.contextmanager
def flagged_client(enabled: bool, memory_limit: str | int) -> Iterator[Client]:
    """Start two one-thread worker processes for a program that has the one flag or not."""
    with (
        dask.config.set({"gpurt.enabled": enabled}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=memory_limit,
            dashboard_address=":0",
            silence_logs=50,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@contextlib.contextmanager
def two_clusters(n_workers: int = 2) -> Iterator[Sides]:
    """Start a stock cluster and one with the runtime, of one-thread worker processes over TCP."""
    with stock_client(n_workers) as stock, stock_client(n_workers) as enabled:
        dask_gpurt.enable(enabled)
        yield Sides(stock, enabled)


def compare(
    sides: Sides,
    name: str,
    make_inputs: Callable[[], Any],
    workload: Callable[[Any], Any],
    *,
    repeats: int,
    target: float | None = None,
    floor: Callable[[], float] | None = None,
) -> Timing:
    """Time `workload(inputs)`, a Dask collection that is persisted, on both sides in turns."""
    inputs = {}
    nbytes = 0
    for side, client in sides.both():
        with client.as_current(), dask.config.set(scheduler=client.get):
            made = make_inputs()
            persisted = [client.persist(one) for one in made]
            wait(persisted)
            inputs[side] = persisted
            nbytes = sum(
                int(n)
                for one in persisted
                for n in client.gather(client.map(_nbytes, client.futures_of(one)))
            )
    timing = Timing(name, nbytes, target=target)

    def once(side: str, client: Client) -> float:
        # Dask would not choose p2p by itself here, because neither client is the default one.
        with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
            return persisting_s(client, workload(inputs[side]))

    order = list(sides.both())
    for side, client in order:
        once(side, client)
    for _ in range(repeats):
        for side, client in order:
            getattr(timing, f"{side}_s").append(once(side, client))
        order.reverse()
        if floor is not None:
            timing.floor_s.append(floor())
        print(f"  {name}: {len(timing.stock_s)}/{repeats}", file=sys.stderr, flush=True)
    print(timing.line(), flush=True)
    inputs.clear()
    for _, client in order:
        settle(client)
    return timing


def _nbytes(part: Any) -> int:
    if isinstance(part, np.ndarray):
        return part.nbytes
    return int(part.memory_usage(deep=True).sum())


def persisting_s(client: Client, collection: Any) -> float:
    """Return the seconds until workers hold a collection in memory; then release it."""
    began = time.perf_counter()
    result = client.persist(collection)
    wait(result)
    elapsed = time.perf_counter() - began
    del result
    settle(client)
    return elapsed


def settle(client: Client) -> None:
    """Wait until the cluster has released the last result and files are on the disk."""
    idle(client)
    os.sync()
    time.sleep(REST_S)


def idle(client: Client) -> None:
    """Wait until the cluster has released the last result."""

    async def until_idle(dask_scheduler: Any) -> None:
        import asyncio

        while any(
            ts.state in ("processing", "waiting") or (ts.state == "memory" and not ts.who_wants)
            for ts in dask_scheduler.tasks.values()
        ):
            await asyncio.sleep(0.005)

    client.run_on_scheduler(until_idle)


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "dask": dask.__version__,
        "distributed": distributed.__version__,
        "pandas": pd.__version__,
        "numpy": np.__version__,
        "pyarrow": pa.__version__,
        "dask_gpurt": dask_gpurt.__version__,
    }


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each side")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full data size")
    parser.add_argument("--only", help="run only workloads with this in their name")
    parser.add_argument("--json", metavar="FILE", help="write timings and versions here")
    return parser


def write_json(path: str | None, timings: list[Timing], **more: Any) -> None:
    if path is None:
        return
    rows = [{**asdict(t), "ratio": t.ratio} for t in timings]
    with open(path, "w") as file:
        json.dump({"machine": machine(), "timings": rows, **more}, file, indent=1)
