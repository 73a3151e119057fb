"""Bytes and seconds of a `status`, and of the plan of a shuffle, for 1,000 workers in one process.

One real worker with 999 peers makes the reports of all workers, each under an address of its own.
They pass through Dask's serialisation twice: from the workers to the scheduler, and from there to
the client. The scheduler's tally adds them up, and the command prints them. Connections are not in
it, and neither is the time of the workers, who work side by side.

A plan says which worker owns which of 10,000 output partitions. The scheduler answers each of 1,000
workers that asks for it.

    python -m benchmarks.thousand_reports
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import dask.config
import pandas as pd
from distributed import Scheduler, Worker
from distributed.protocol import ToPickle, dumps, loads

from benchmarks.harness import arguments, write_json
from dask_gpurt import config
from dask_gpurt.codecs.rule import decide
from dask_gpurt.command.status import as_text
from dask_gpurt.plugins.patches.p2p import DataFrameShuffleSpec, ShuffleId
from dask_gpurt.plugins.shuffle.frame_run import FrameSpec, frame_kind
from dask_gpurt.plugins.worker_counters import counted_reports
from dask_gpurt.plugins.worker_report import most_entries
from dask_gpurt.shuffle.figures import RunFigures
from dask_gpurt.shuffle.tally import MAX_RUNS

N_WORKERS = 1_000
N_RUNS = MAX_RUNS
ROWS = 1_000_000
#: Number of the worker with the busiest link.
BUSIEST = 500
WANTED_NBYTES, WANTED_S = 2_000_000, 1.0
N_PARTITIONS = 10_000
WANTED_PLAN_NBYTES, WANTED_PLANS_S = 100_000, 0.3


@dataclass
class Measured:
    """The cost of one `status`, and its content."""

    reports_nbytes: int
    answer_nbytes: int
    seconds: dict[str, float]
    shuffles: list[dict[str, Any]]
    text: str

    @property
    def wire_nbytes(self) -> int:
        return self.reports_nbytes + self.answer_nbytes

    def line(self, name: str) -> str:
        parts = ", ".join(f"{part} {s:.2f} s" for part, s in self.seconds.items())
        return (
            f"{N_WORKERS} reports, {name}: {self.wire_nbytes / 1e6:5.2f} MB "
            f"(at most {WANTED_NBYTES / 1e6:g}), {sum(self.seconds.values()):.2f} s "
            f"(at most {WANTED_S:g}): {parts}; of the bytes {self.reports_nbytes / 1e6:.2f} MB "
            "are the workers' reports, the others the answer to the client"
        )


def address(number: int) -> str:
    return f"tcp://10.0.{number // 250}.{number % 250}:{40_000 + number}"


PEERS = [address(number) for number in range(1, N_WORKERS)]


class OpenRun:
    """A run that goes on, as `WorkerRuntime` knows it."""

    def __init__(self, run_id: int) -> None:
        self.id, self.run_id = "0123456789abcdef0123456789abcdef", run_id

    def report(self) -> dict[str, Any]:
        return snapshot(self.run_id)


def snapshot(number: int) -> dict[str, Any]:
    """Return the snapshot of a run with all peers on one worker, which owns ten partitions."""
    figures = RunFigures(f"{number:032x}", number, "pandas.DataFrame", 1.7e9 + number)
    figures.add(rows_in=ROWS, local_nbytes=128 << 10)
    for peer_number, peer in enumerate(PEERS):
        figures.sent(peer, (128 << 10) + peer_number, 128 << 10, 64 << 10, 0.01)
    return figures.snapshot({10 * number + n: ROWS // 10 + n for n in range(10)})


def fill(worker: Worker) -> None:
    """Give a worker links to all peers, and decisions on codecs for each of them."""
    state = worker.extensions["gpurt"]
    why_not = {"shared": "it runs in another container, or on another host", "ucx": "no ucxx here"}
    found = {
        peer: {"path": "comm", "why_not": why_not, "bandwidth": 1.25e9 + number}
        for number, peer in enumerate(PEERS)
    }
    decisions = [
        decide("auto", (), section=name, itemsize=8, nbytes=1 << 20, link=peer, bandwidth=1.25e9)
        for peer in PEERS
        for name in ("key", "x", "y", "n")
    ]
    state.links.report = lambda: found
    state.codec_decisions = lambda: decisions


def busier(run: dict[str, Any]) -> dict[str, Any]:
    """Return the snapshot of a run whose busiest link carried twice as much."""
    return {**run, "links": {peer: (2 * n, s) for peer, (n, s) in run["links"].items()}}


async def reports_of_all(worker: Worker, n_open: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the report of each worker as it travels, and the last heartbeat of each."""
    state = worker.extensions["gpurt"]
    fill(worker)
    for number in range(1, N_RUNS - n_open + 1):
        state.run_reports.ended(snapshot(number))
    heartbeat = state.heartbeat_data()
    state.heartbeat_data()  # the second heartbeat with these runs
    open_runs = [OpenRun(number) for number in range(N_RUNS - n_open + 1, N_RUNS + 1)]
    for run in open_runs:
        state.begin_run(run)
    report = await worker.handlers["gpurt_report"](most=most_entries(N_WORKERS))
    for run in open_runs:
        state.end_run(run, run.report())
    reports, heartbeats = [report] * N_WORKERS, [heartbeat] * N_WORKERS
    reports[BUSIEST] = {**report, "open_runs": [busier(run) for run in report["open_runs"]]}
    heartbeats[BUSIEST] = {**heartbeat, "runs": [busier(run) for run in heartbeat["runs"]]}
    return [dumps(one) for one in reports], heartbeats


async def status_of_all(n_open: int) -> Measured:
    """Return the cost of a status if each worker has 32 runs, so many of them open."""
    with dask.config.set({"gpurt.enabled": True}):
        async with (
            Scheduler(port=0, dashboard=False) as scheduler,
            Worker(scheduler.address, nthreads=2, memory_limit="8 GiB", dashboard=False) as worker,
        ):
            plugin = scheduler.plugins["gpurt"]
            while not plugin.readiness.ready:
                await asyncio.sleep(0.01)
            frames, heartbeats = await reports_of_all(worker, n_open)
            return await status_from(plugin, frames, heartbeats)


async def status_from(plugin: Any, frames: list[Any], heartbeats: list[Any]) -> Measured:
    workers = {address(n): SimpleNamespace(server_id=f"Worker-{n}") for n in range(N_WORKERS)}
    for (where, one), said in zip(workers.items(), heartbeats, strict=True):
        plugin.tally.begin(one.server_id, where)
        plugin.tally.take(one.server_id, said)
    began = time.perf_counter()
    received = dict(zip(workers, map(loads, frames), strict=True))
    known: Any = SimpleNamespace(workers=workers)
    reports = counted_reports(known, plugin.tally, None, received)
    status = await plugin.status(reports=False)
    answer = dumps({**status, "workers": reports, "ready": [*reports]})
    answered = time.perf_counter()
    shown = {"scheduler": plugin.scheduler.address, **loads(answer)}
    text = as_text(shown, 200)
    seconds = {"scheduler": answered - began, "client": time.perf_counter() - answered}
    return Measured(
        sum(map(nbytes_of, frames)), nbytes_of(answer), seconds, [*shown["shuffles"]], text
    )


def nbytes_of(frames: Any) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def rows_of_reports(repeats: int) -> list[dict[str, Any]]:
    """Print and return the best of so many runs, for no, one and some open runs."""
    rows = []
    for n_open in (0, 1, most_entries(N_WORKERS)):
        found = min(
            (asyncio.run(status_of_all(n_open)) for _ in range(repeats)),
            key=lambda one: sum(one.seconds.values()),
        )
        print(found.line(f"{N_RUNS} runs, {n_open} open"), flush=True)
        rows.append({"open": n_open, "nbytes": found.wire_nbytes, "seconds": found.seconds})
    return rows


def plan_answer(n_partitions: int, n_workers: int) -> Callable[[], Any]:
    """Return a function that serialises the scheduler's answer with the plan of a shuffle."""
    meta = pd.DataFrame({"key": [1], "x": [1.0]}).iloc[:0]
    stock = DataFrameShuffleSpec(
        id=ShuffleId("0123456789abcdef0123456789abcdef"),
        disk=True,
        npartitions=n_partitions,
        column="_partitions",
        meta=meta,
        parts_out=list(range(n_partitions)),
        drop_column=True,
    )
    order = sorted(range(n_partitions), key=str)
    spec = FrameSpec.replacing(stock, frame_kind(meta), config.read().shuffle, None, order)
    owners = {number: address(number * n_workers // n_partitions) for number in range(n_partitions)}
    run_spec = spec.create_new_run(worker_for=owners, span_id=None).run_spec
    return lambda: dumps({"status": "OK", "run_spec": ToPickle(run_spec)})


def rows_of_plans(repeats: int) -> list[dict[str, Any]]:
    """Print and return the best of so many runs."""
    runs = []
    for _ in range(repeats):
        answer = plan_answer(N_PARTITIONS, N_WORKERS)
        began = time.perf_counter()
        nbytes = sum(nbytes_of(answer()) for _ in range(N_WORKERS))
        runs.append((time.perf_counter() - began, nbytes))
    seconds, nbytes = min(runs)
    print(
        f"{N_WORKERS} plans of {N_PARTITIONS} partitions: {nbytes / 1e6:.1f} MB, "
        f"{seconds:.2f} s (at most {WANTED_PLANS_S:g})"
    )
    return [{"plans": N_WORKERS, "nbytes": nbytes, "seconds": seconds}]


def main() -> None:
    options = arguments((__doc__ or "").replace("\n", " ")).parse_args()
    logging.disable(logging.WARNING)
    repeats = options.repeats
    write_json(options.json, [], reports=rows_of_reports(repeats), plans=rows_of_plans(repeats))


if __name__ == "__main__":
    main()
