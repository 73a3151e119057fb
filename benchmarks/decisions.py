"""Scheduler time for each decision about where a task goes, stock against the runtime.

A real scheduler, with workers that are only its own records of them: no processes, no messages.
Each case prepares tasks that can run. Timed is `waiting` to `processing`, which is the decision
and the books that are kept of it, by the scheduler's own code; and the decision alone. Sides take
turns on the same scheduler, placement being switched on and off, and every batch is put back.

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
    """A scheduler with workers of which it has only the records."""

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
            # Or every task it is given is an error in the log, which takes longer than the task.
            stealing.add_worker(scheduler, address)
            self.workers.append(ws)
        for ws in self.workers:
            scheduler.check_idle_saturated(ws)

    def task(self, key: Any, needs: list[TaskState]) -> TaskState:
        """A task that waits for nothing."""
        ts = self.scheduler.new_task(key, Task(key, int), "waiting")
        ts.priority = (0, 1, len(self.scheduler.tasks))
        for dts in needs:
            ts.add_dependency(dts)
        ts.waiting_on = set()
        ts.waiters = set()
        self.scheduler.task_prefixes[ts.prefix.name].duration_average = 0.05
        return ts

    def result(self, key: Any, nbytes: int, *holders: WorkerState) -> TaskState:
        """A result in the memory of some workers."""
        ts = self.task(key, [])
        ts.state = "memory"
        ts.set_nbytes(nbytes)
        for ws in holders:
            self.scheduler.add_replica(ts, ws)
        return ts


def one_input(bench: Bench, i: int) -> TaskState:
    """Its only input is on one worker, which has a thread to spare."""
    home = bench.workers[i % len(bench.workers)]
    return bench.task(("one", i), [bench.result(("one-x", i), 8 * MB, home)])


def two_inputs(bench: Bench, i: int) -> TaskState:
    """Each of its inputs is on another worker."""
    n = len(bench.workers)
    places = bench.workers[i % n], bench.workers[(i * 7 + 1) % n]
    needs = [bench.result((f"two-{j}", i), (8 + j) * MB, ws) for j, ws in enumerate(places)]
    return bench.task(("two", i), needs)


def eight_inputs(bench: Bench, i: int) -> TaskState:
    """A step of a tree reduction."""
    n = len(bench.workers)
    needs = [
        bench.result((f"eight-{j}", i), 8 * MB, bench.workers[(i * 7 + j * 11) % n])
        for j in range(8)
    ]
    return bench.task(("eight", i), needs)


def joined(bench: Bench, i: int) -> TaskState:
    """Its output will be needed together with a result that is on another worker."""
    n = len(bench.workers)
    x = bench.result(("joined-x", i), 8 * MB, bench.workers[i % n])
    y = bench.result(("joined-y", i), 8 * MB, bench.workers[(i * 7 + 1) % n])
    ts = bench.task(("joined", i), [x])
    bench.task(("join", i), [ts, y])
    return ts


def at_work(case: Callable[[Bench, int], TaskState]) -> Callable[[Bench, int], TaskState]:
    """A case in which every worker has as much to do as it has threads, and a task more."""

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
    """One of its inputs is on every worker."""
    if i == 0:
        bench.result("everywhere", 8 * MB, *bench.workers)
    x = bench.result(("wide-x", i), 8 * MB, bench.workers[i % len(bench.workers)])
    return bench.task(("wide", i), [bench.scheduler.tasks["everywhere"], x])


def root(bench: Bench, i: int) -> TaskState:
    """One of very many without inputs; every second one belongs to the one before."""
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
    """Seconds for each task of the decision alone; of root tasks there is none to be had."""
    scheduler = bench.scheduler
    if scheduler.is_rootish(tasks[0]):
        return 0.0
    began = time.perf_counter()
    for ts in tasks:
        scheduler.decide_worker_non_rootish(ts)
    return (time.perf_counter() - began) / len(tasks)


def transition(bench: Bench, tasks: list[TaskState]) -> float:
    """Seconds for each task of all of `waiting` to `processing`."""
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
    """Microseconds for each task, either way, and the median of what they were to each other.

    Sides alternate within milliseconds: what else the machine does makes seconds half as long
    again from one second to the next, but both sides of a pair alike.
    """
    # By itself placement is for machines that are described.
    topology = gpu_hosts(
        math.ceil(len(bench.workers) / WORKERS_PER_HOST), 0, nic_bandwidth=12e9, nvlink=False
    )
    times: dict[str, list[float]] = {"stock": [], "gpurt": []}
    gc.disable()
    for repeat in range(repeats + 1):
        for side in ("stock", "gpurt") if repeat % 2 else ("gpurt", "stock"):
            # A new one each time: nothing is decided twice, and at this size most pairs of
            # workers come up for the first time.
            placement = None
            if side == "gpurt":
                placement = Placement(bench.scheduler, "data-aware", topology)
            # Before each side, not each pair: it leaves nothing of the tasks in the processor's
            # caches, and whichever side came second would find there what the first had used.
            gc.collect()
            times[side].append(timed(bench, tasks))
            if placement is not None:
                placement.remove()
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
            # As in production: the plugins that come with distributed, and no validation.
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
    # It would ask workers that are not there to drop what many of them have.
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
