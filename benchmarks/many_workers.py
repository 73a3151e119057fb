"""Seconds and open files of a shuffle of tiny partitions between 64 real worker processes.

Each of the 64 workers has something for each other one, and hardly any of it. So this shows the
cost of peers: connections, messages, files. Workers start from one preloaded process, which takes
less memory and time; they share nothing else. Dask's profiler is off, which alone would keep two
cores busy. One cluster after the other: as many idle workers would slow down those of the other.

    python -m benchmarks.many_workers
    python -m benchmarks.many_workers --workers 16 --repeats 1
    python -m benchmarks.many_workers --files 256

With `--files`, every worker has that limit of open files, and only the runtime's result is checked.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client

import dask_gpurt
from benchmarks.harness import (
    Timing,
    arguments,
    persisting_s,
    stock_client,
    write_json,
)
from benchmarks.many_partitions import FEW, shuffled
from benchmarks.shuffle import numbers_part

N_PARTITIONS = 256
#: Highest ratio to stock's time, and highest number of open files of a worker, that are wanted.
TIME_TARGET, FILES_TARGET = 1.2, 300

inputs, workload = shuffled(numbers_part, N_PARTITIONS, FEW)


def most_open_files(client: Client, work: Callable[[], Any]) -> int:
    """Return the highest number of open files that a worker has while this work goes on."""
    processes: list[int] = list(client.run(os.getpid).values())
    counts = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.1):
            counts.extend(len(os.listdir(f"/proc/{process}/fd")) for process in processes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        is_over.set()
        watcher.join()
    return max(counts)


def limit_files(n_files: int) -> None:
    """Lower this process's limit of open files, for good."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, n_files))


def answer(rows: dd.DataFrame, **how: Any) -> tuple[int, int]:
    """Return the number of rows, and a sum that depends on all rows."""
    count, keys = dask.compute(rows.map_partitions(len).sum(), rows["key"].sum(), **how)
    return int(count), int(keys)


def within_files(n_workers: int, n_files: int) -> None:
    """Shuffle with few files allowed, and check the result."""
    expected = answer(*inputs(), scheduler="sync")
    found: list[Any] = []
    with stock_client(n_workers) as client, client.as_current():
        client.run(limit_files, n_files)
        dask_gpurt.enable(client)
        began = time.perf_counter()
        with dask.config.set({"dataframe.shuffle.method": "p2p"}):
            rows = workload(inputs())
            most = most_open_files(client, lambda: found.append(answer(rows)))
    if found != [expected]:
        raise SystemExit(f"with {n_files} files: {found[0]} instead of {expected}")
    print(f"{n_workers} workers of {n_files} files: right, {time.perf_counter() - began:.1f} s,")
    print(f"at most {most} open files")


def timed(n_workers: int, repeats: int) -> tuple[Timing, dict[str, int]]:
    """Shuffle with stock Dask and with the runtime, in clusters that take turns."""
    name = f"{n_workers} workers, {N_PARTITIONS} x {N_PARTITIONS} tiny"
    timing = Timing(name, 0, target=1 / TIME_TARGET)
    files = {}
    order = ["stock", "enabled"]
    for repeat in range(repeats):
        for side in order:
            with stock_client(n_workers) as client:
                if side == "enabled":
                    dask_gpurt.enable(client)
                seconds = getattr(timing, f"{side}_s")
                with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
                    persisting_s(client, workload(inputs()))  # it makes the connections
                    seconds.append(persisting_s(client, workload(inputs())))
                    seconds.append(persisting_s(client, workload(inputs())))
                    files[side] = most_open_files(client, partial(once, client))
        order.reverse()
        print(f"  {repeat + 1}/{repeats}: {timing.line()}", file=sys.stderr, flush=True)
    print(timing.line())
    print(f"most open files of a worker: {files} (at most {FILES_TARGET})")
    return timing, files


def once(client: Client) -> None:
    persisting_s(client, workload(inputs()))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--files", type=int, help="limit of open files of each worker")
    options = parser.parse_args()
    settings = {
        "distributed.worker.multiprocessing-method": "forkserver",
        "distributed.worker.profile.enabled": False,
    }
    with dask.config.set(settings):
        if options.files:
            within_files(options.workers, options.files)
            return
        timing, files = timed(options.workers, options.repeats)
    write_json(options.json, [timing], most_open_files=files)


if __name__ == "__main__":
    main()
