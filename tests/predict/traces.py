"""Traces for tests of predictions, written as a cluster would record them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_gpurt.tracing.events import MEMORY_LIMITS, LaneWork, TaskTimes, Trace, TraceProcess

MIB = 2**20


def trace(
    *tasks: TaskTimes,
    work: Sequence[LaneWork] = (),
    hosts: Sequence[str] = ("box", "box"),
    memory_nbytes: int = 8 * 2**30,
    **more: Any,
) -> Trace:
    """Return a trace of workers of one thread on these hosts. Process 0 is the scheduler."""
    workers = [
        TraceProcess(f"tcp://{host}:{number}", f"w{number}", host, n_threads=1)
        for number, host in enumerate(hosts, 1)
    ]
    scheduler = TraceProcess("tcp://box:0", "scheduler", "box", "scheduler")
    return Trace(
        [scheduler, *workers],
        list(work),
        sorted(tasks, key=lambda one: one.start_s),
        wall_s=max((one.known_s for one in tasks), default=0.0),
        about={MEMORY_LIMITS: {one.address: memory_nbytes for one in workers}},
        **more,
    )


def ran(
    number: int,
    key: str,
    start_s: float,
    end_s: float,
    *needs: int,
    ready_s: float | None = None,
    worker: int = 1,
    nbytes: int = 0,
    submitted_s: float = 0.99,
) -> TaskTimes:
    """Return a run of a task, which was ready and on its worker just before its start."""
    ready_s = start_s - 0.002 if ready_s is None else ready_s
    return TaskTimes(
        number,
        key,
        worker,
        needs,
        ready_s,
        ready_s,
        ready_s,
        start_s,
        end_s,
        end_s + 0.002,
        nbytes,
        thread=worker,
        submitted_s=submitted_s,
    )
