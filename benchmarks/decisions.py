"""Scheduler time of each decision about the worker of a task, stock against the runtime.

The scheduler is real. Its workers are only its own records of them, so there are no processes and
no messages. Each case prepares tasks that can run. Two things are timed: the scheduler's transition
from `waiting` to `processing`, which contains the decision, and the decision alone. Both sides use
the same scheduler in turns, with placement on and off. After each batch its tasks are reset.

    python -m benchmarks.decisions --repeats 30
    python -m benchmarks.decisions --workers 100 --only joined
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import dask
from dask._task_spec import Task
from distributed import Scheduler
from distributed.core import Status
from distributed.scheduler import TaskState, WorkerState

from benchmarks.harness import write_json
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.simulate.example_clusters import gpu_hosts

N_TASKS = 200
WORKERS_PER_HOST = 8
TARGET = 1.2
MB = 1_000_000


class Bench:
    """A scheduler whose workers exist only in its own records."""

    def __init__(self, scheduler: Scheduler, n_workers: int) -> None:
        self.scheduler = scheduler
        self.workers: list[WorkerState] = []
        stealing: Any = scheduler.extensions["stealing"]
        for i in range(n_workers):
            host = i // WORKERS_PER_HOST
            address = f"tcp://10.0.{host >> 8}.{host & 255}:{4000 + i % WORKERS_PER_HOST}"
            ws = WorkerState(
                address=address,
                status=Status.running,
                pid=i,
                name=i,
                nthreads=2,
                memory_limit=16 << 30,
                local_directory="",
                nanny=None,
                server_id=f"id-{i}",
                scheduler=scheduler,
            )
            ws.metrics = {"memory": 0, "spilled_bytes": {"memory": 0, "disk": 0}}
            scheduler.workers[address] = ws
            scheduler.aliases[i] = address
            scheduler.running.add(ws)
            scheduler.total_nthreads += ws.nthreads
            host_info = scheduler.host_info.setdefault(ws.host, {"addresses": set(), "nthreads": 0})
            host_info["addresses"].add(address)
            host_info["nthreads"] += ws.nthreads
            # Without this, stealing logs an error for every task, which takes longer than the task.
            stealing.add_worker(scheduler, address)
            self.workers.append(ws)
        for ws in self.workers:
            scheduler.check_idle_saturated(ws)

    def task(self, key: Any, needs: list[TaskState]) -> TaskState:
        """Add a task that can run at once."""
        ts = self.scheduler.new_task(key, Task(key, int), "waiting")
        ts.priority = (0, 1, len(self.scheduler.tasks))
        for dts in needs:
            ts.add_dependency(dts)
        ts.waiting_on = set()
        ts.waiters = set()
        self.scheduler.task_prefixes[ts.prefix.name].duration_average = 0.05
        return ts

    def result(self, key: Any, nbytes: int, *holders: WorkerState) -> TaskState:
        """Add a task whose result is in the memory of these workers."""
        ts = self.task(key, [])
        ts.state = "memory"
        ts.set_nbytes(nbytes)
        for ws in holders:
            self.scheduler.add_replica(ts, ws)
        return ts


def one_input(bench: Bench, i: int) -> TaskState:
    """A task with one input, on a worker that has an idle thread."""
    home = bench.workers[i % len(bench.workers)]
    return bench.task(("one", i), [bench.result(("one-x", i), 8 * MB, home)])


def two_inputs(bench: Bench, i: int) -> TaskState:
    """A task with two inputs, on two workers."""
    n = len(bench.workers)
    places = bench.workers[i % n], bench.workers[(i * 7 + 1) % n]
    needs = [bench.result((f"two-{j}", i), (8 + j) * MB, ws) for j, ws in enumerate(places)]
    return bench.task(("two", i), needs)


def eight_inputs(bench: Bench, i: int) -> TaskState:
    """A task with eight inputs, as in a tree reduction."""
    n = len(bench.workers)
    needs = [
        bench.result((f"eight-{j}", i), 8 * MB, bench.workers[(i * 7 + j * 11) % n])
        for j in range(8)
    ]
    return bench.task(("eight", i), needs)


def joined(bench: Bench, i: int) -> TaskState:
    """A task whose output will be needed together with a result on another worker."""
    n = len(bench.workers)
    x = bench.result(("joined-x", i), 8 * MB, bench.workers[i % n])
    y = bench.result(("joined-y", i), 8 * MB, bench.workers[(i * 7 + 1) % n])
    ts = bench.task(("joined", i), [x])
    bench.task(("join", i), [ts, y])
    return ts


def at_work(case: Callable[[Bench, int], TaskState]) -> Callable[[Bench, int], TaskState]:
    """Change a case so that every worker already has one task more than it has threads."""

    def prepared(bench: Bench, i: int) -> TaskState:
        if i == 0:
            for number, ws in enumerate(bench.workers):
                for j in range(ws.nthreads + 1):
                    needed = bench.result((f"busy-x-{j}", number), MB, ws)
                    ts = bench.task((f"busy-{j}", number), [needed])
                    ts.state = "processing"
                    ts.processing_on = ws
                    ws.add_to_processing(ts)
                bench.scheduler.check_idle_saturated(ws)
        return case(bench, i)

    prepared.__name__ = f"{case.__name__}_busy"
    return prepared


def widely_held(bench: Bench, i: int) -> TaskState:
    """A task with two inputs, one of which is on every worker."""
    if i == 0:
        bench.result("everywhere", 8 * MB, *bench.workers)
    x = bench.result(("wide-x", i), 8 * MB, bench.workers[i % len(bench.workers)])
    return bench.task(("wide", i), [bench.scheduler.tasks["everywhere"], x])


def root(bench: Bench, i: int) -> TaskState:
    """One of very many tasks without inputs; tasks 2n and 2n + 1 have a common dependent."""
    ts = bench.task(("root", i), [])
    if i % 2:
        bench.task(("pair", i), [ts, bench.scheduler.tasks["root", i - 1]])
    return ts


CASES: list[Callable[[Bench, int], TaskState]] = [
    one_input,
    two_inputs,
    eight_inputs,
    joined,
    *map(at_work, (one_input, two_inputs, eight_inputs, joined)),
    widely_held,
    root,
]


def decide(bench: Bench, tasks: list[TaskState]) -> float:
    """Return seconds of the decision for each task; 0 for root tasks, which have no decision."""
    scheduler = bench.scheduler
    if scheduler.is_rootish(tasks[0]):
        return 0.0
    began = time.perf_counter()
    for ts in tasks:
        scheduler.decide_worker_non_rootish(ts)
    return (time.perf_counter() - began) / len(tasks)


def transition(bench: Bench, tasks: list[TaskState]) -> float:
    """Return seconds of the transition from `waiting` to `processing` for each task."""
    scheduler = bench.scheduler
    began = time.perf_counter()
    for ts in tasks:
        scheduler._transition(ts.key, "processing", "benchmark")
    taken_s = time.perf_counter() - began
    for ts in tasks:
        ws = ts.processing_on
        assert ws is not None
        ws.remove_from_processing(ts)
        ts.processing_on = None
        ts.state = "waiting"
        ts.waiting_on = set()
        scheduler.check_idle_saturated(ws)
    return taken_s / len(tasks)


TIMED: dict[str, Callable[[Bench, list[TaskState]], float]] = {
    "decision": decide,
    "transition": transition,
}


def compare(
    bench: Bench,
    tasks: list[TaskState],
    timed: Callable[[Bench, list[TaskState]], float],
    repeats: int,
) -> dict[str, float | None]:
    """Return microseconds for each task on both sides, and the median of the paired ratios.

    Sides alternate within milliseconds. Other load on the machine can make one second half as fast
    as the next, but it slows both sides of a pair alike.
    """
    # The runtime places tasks by cost only if the machines are described.
    topology = gpu_hosts(
        math.ceil(len(bench.workers) / WORKERS_PER_HOST), 0, nic_bandwidth=12e9, nvlink=False
    )
    times: dict[str, list[float]] = {"stock": [], "gpurt": []}
    gc.disable()
    for repeat in range(repeats + 1):
        for side in ("stock", "gpurt") if repeat % 2 else ("gpurt", "stock"):
            # A new placement each time has no remembered decisions. In a real cluster of this
            # size, most pairs of workers are seen for the first time, too.
            placement = None
            if side == "gpurt":
                placement = Placement(bench.scheduler, "data-aware", topology)
            # Collecting before each side, not each pair, clears the processor's caches of the
            # tasks. Otherwise the second side would find there the data of the first.
            gc.collect()
            times[side].append(timed(bench, tasks))
            if placement is not None:
                placement.close()
    gc.enable()
    times = {side: all_[1:] for side, all_ in times.items()}
    ratios = [b / a for a, b in zip(times["stock"], times["gpurt"], strict=True) if a]
    return {
        **{side: statistics.median(all_) * 1e6 for side, all_ in times.items()},
        "ratio": statistics.median(ratios) if ratios else None,
    }


async def measure(n_workers: int, repeats: int, only: str | None) -> list[dict[str, Any]]:
    found = []
    for case in CASES:
        if only not in (None, case.__name__):
            continue
        async with Scheduler(dashboard_address=":0", port=0) as scheduler:
            bench = Bench(scheduler, n_workers)
            # Plugins of distributed are on and validation is off, as in production.
            n_tasks = 3 * scheduler.total_nthreads if case is root else N_TASKS
            tasks = [case(bench, i) for i in range(n_tasks)][:N_TASKS]
            if case is root:
                assert scheduler.is_rootish(tasks[0])
            row: dict[str, Any] = {"case": case.__name__}
            for name, timed in TIMED.items():
                row[name] = compare(bench, tasks, timed, repeats)
            scheduler.tasks.clear()
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", choices=[case.__name__ for case in CASES])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    # The active memory manager would ask the workers, which do not exist, to drop copies.
    with dask.config.set({"distributed.scheduler.active-memory-manager.start": False}):
        found = asyncio.run(measure(options.workers, options.repeats, options.only))
    print(f"{options.workers} workers; microseconds a task (ratio at most {TARGET:g} wanted)")
    for row in found:
        cells = [
            f"{name} {row[name]['stock']:7.1f} -> {row[name]['gpurt']:7.1f} us"
            f" ({row[name]['ratio']:.2f})"
            for name in ("decision", "transition")
            if row[name]["stock"] > 1
        ]
        print(f"  {row['case']:17}", "; ".join(cells))
    if options.json:
        write_json(options.json, [], placement=found)


if __name__ == "__main__":
    main()
