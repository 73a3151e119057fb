"""How long a step of communication waits to begin while the queue of compute steps is full.

Steps of communication come at any moment of a compute step, with twenty compute steps waiting.
On the emulated device both are kernels, on streams of their own; in a lane both are work for its
one thread; *beside tasks* as many threads as there are cores compute, as a worker's do, and
communication has a lane of its own. Each is also measured with the same priority for both, which is
what a plain queue does, or on the threads of the tasks.

A compute step takes its time from NumPy, which lets go of the interpreter lock, or from Python,
which does not. On the emulated device a step only takes time. Nothing that runs is stopped, so one
compute step is what a communication step may have to wait for.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from benchmarks.harness import arguments, machine
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.lanes import Lane

DEPTH = 20
SAMPLES = 200
#: What a compute step is made to take, roughly; what it took is measured.
STEP_S = 0.02
#: p95 of the delay, in compute steps, at most.
TARGET = 1.0

#: Has something done, later.
Queue = Callable[[Callable[[], None]], Any]


def sleep() -> None:
    time.sleep(STEP_S)


def numpy_step() -> Callable[[], None]:
    """A step that lets go of the interpreter lock."""
    values = np.random.default_rng(0).random(1 << 20)
    out = np.empty_like(values)
    return _as_long(lambda: np.sqrt(values, out=out))


def python_step() -> Callable[[], None]:
    """A step that holds the interpreter lock."""
    return _as_long(lambda: sum(range(10_000)))


def _as_long(call: Callable[[], Any]) -> Callable[[], None]:
    """What does a call so often that it takes about a step."""
    took_s = []
    for _ in range(100):
        began = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began)
    n_calls = max(1, round(STEP_S / statistics.median(took_s)))

    def step() -> None:
        for _ in range(n_calls):
            call()

    return step


@contextlib.contextmanager
def on_device(urgency: Priority) -> Iterator[tuple[Queue, Queue]]:
    """Kernels of two streams; one engine computes."""
    device = EmulatedDevice(1 << 20)
    compute, communication = device.stream("compute"), device.stream("communication", urgency)
    try:
        yield compute.launch, communication.launch
    finally:
        device.close()


@contextlib.contextmanager
def in_one_lane(urgency: Priority) -> Iterator[tuple[Queue, Queue]]:
    with Lane("lane") as lane:
        yield lane.submit, lambda call: lane.submit(call, priority=urgency)


@contextlib.contextmanager
def beside_tasks(urgency: Priority) -> Iterator[tuple[Queue, Queue]]:
    """Threads that compute, and a lane for communication; without urgency on the same threads."""
    with Lane("tasks", os.cpu_count() or 1) as tasks, Lane("codec") as codec:
        yield tasks.submit, (codec if urgency is Priority.HIGH else tasks).submit


def measure(
    kind: Callable[[Priority], contextlib.AbstractContextManager[tuple[Queue, Queue]]],
    step: Callable[[], None],
    urgency: Priority,
    n_samples: int,
) -> dict[str, float]:
    """Delays of communication steps, and what compute steps took meanwhile."""
    chance = random.Random(0)
    took_s: list[float] = []
    delays_s: list[float] = []
    with kind(urgency) as (compute, communicate):

        def computing() -> None:
            began = time.perf_counter()
            step()
            took_s.append(time.perf_counter() - began)

        waiting = 0
        for _ in range(n_samples):
            for _ in range(DEPTH + len(took_s) - waiting):
                compute(computing)
                waiting += 1
            # At any moment of a step.
            time.sleep(chance.uniform(1, 2) * STEP_S)
            begun: Future[float] = Future()
            asked = time.perf_counter()
            communicate(lambda begun=begun: begun.set_result(time.perf_counter()))
            delays_s.append(begun.result() - asked)
    step_s = statistics.median(took_s)
    p50, p95 = np.percentile(delays_s, [50, 95])
    return {"step_s": step_s, "p50_s": float(p50), "p95_s": float(p95)}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    kinds = {"emulated device": on_device, "one lane": in_one_lane, "beside tasks": beside_tasks}
    steps = {"time": sleep, "NumPy": numpy_step(), "Python": python_step()}
    rows = []
    for name, kind in kinds.items():
        for what, step in steps.items():
            if (what == "time") != (kind is on_device):
                continue
            for urgency in (Priority.HIGH, Priority.NORMAL):
                n_samples = max(5, int(SAMPLES * options.scale))
                if urgency is Priority.NORMAL:
                    n_samples = max(5, n_samples // 20)  # each waits for the whole queue
                row = measure(kind, step, urgency, n_samples)
                rows.append({"where": name, "step": what, "priority": urgency.name, **row})
                print(
                    f"{name:16} {what:6} {urgency.name:6}  compute step {row['step_s'] * 1e3:6.2f}"
                    f" ms  delay p50 {row['p50_s'] * 1e3:7.2f} ms  p95 {row['p95_s'] * 1e3:7.2f} ms"
                    f"  = {row['p95_s'] / row['step_s']:6.2f} steps"
                    + (f" (under {TARGET:g})" if urgency is Priority.HIGH else ""),
                    flush=True,
                )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "start_delay": rows}, file, indent=1)


if __name__ == "__main__":
    main()
