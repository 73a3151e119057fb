"""Delay before a communication step starts while twenty compute steps wait in the queue.

A communication step comes at a random moment of a compute step. There are three places:

- *emulated device*: both kinds of steps are kernels, on two streams.
- *one lane*: both are calls for the single thread of a lane.
- *beside tasks*: as many threads as cores compute, as on a worker, and communication has a lane.

Each place is also measured without priority for communication, as in a plain queue. *Beside tasks*,
communication then uses the threads of the tasks.

A compute step runs NumPy, which releases the interpreter lock, or Python code, which holds it. On
the emulated device a step only waits. No running step is interrupted, so a communication step may
have to wait for one compute step.
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
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import arguments, machine
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.lanes import Lane

DEPTH = 20
SAMPLES = 200
#: Approximate seconds of a compute step; its real duration is measured.
STEP_S = 0.02
#: Highest p95 of the delay that is wanted, in compute steps.
TARGET = 1.0

#: Takes a call and runs it later.
Queue = Callable[[Callable[[], None]], Any]


def sleep() -> None:
    time.sleep(STEP_S)


def numpy_step() -> Callable[[], None]:
    """Make a step that releases the interpreter lock."""
    values = np.random.default_rng(0).random(1 << 20)
    out = np.empty_like(values)
    return _as_long(lambda: np.sqrt(values, out=out))


def python_step() -> Callable[[], None]:
    """Make a step that holds the interpreter lock."""
    return _as_long(lambda: sum(range(10_000)))


def _tell_when(begun: Future[float]) -> None:
    begun.set_result(time.perf_counter())


def _as_long(call: Callable[[], Any]) -> Callable[[], None]:
    """Make a step that repeats a call until about `STEP_S` has passed."""
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
    """Yield queues for kernels on two streams of an emulated device with one compute engine."""
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
    """Yield a pool of compute threads, and a lane for communication if it has high priority."""
    with Lane("tasks", os.cpu_count() or 1) as tasks, Lane("codec") as codec:
        yield tasks.submit, (codec if urgency is Priority.HIGH else tasks).submit


def measure(
    kind: Callable[[Priority], contextlib.AbstractContextManager[tuple[Queue, Queue]]],
    step: Callable[[], None],
    urgency: Priority,
    n_samples: int,
) -> dict[str, float]:
    """Return delays of communication steps, and the duration of compute steps meanwhile."""
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
            # The communication step comes at a random moment of a compute step.
            time.sleep(chance.uniform(1, 2) * STEP_S)
            begun: Future[float] = Future()
            asked = time.perf_counter()
            communicate(partial(_tell_when, begun))
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
