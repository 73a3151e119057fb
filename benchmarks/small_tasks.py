"""Seconds of programs that are many small tasks, where the runtime can only cost.

Each program runs on a stock cluster and on one with the runtime, in turns. Processor seconds are
those of both workers, and of this process, which has the client and both schedulers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import psutil
from dask.delayed import delayed
from distributed import Client

from benchmarks.harness import Sides, arguments, idle, in_turns, two_clusters, write_json


def _one(value: int) -> int:
    return value


def _add(*values: int) -> int:
    return sum(values)


def one_by_one(client: Client) -> int:
    """Submit 200 tasks, and wait for each."""
    return sum(client.submit(_one, n, pure=False).result() for n in range(200))


def at_once(client: Client) -> int:
    """Map 1,000 tasks that have no inputs."""
    return sum(client.gather(client.map(_one, range(1_000), pure=False)))


def chains(client: Client) -> int:
    """Submit 20 chains of 50 tasks."""
    ends = []
    for n in range(20):
        future = client.submit(_one, n, pure=False)
        for _ in range(49):
            future = client.submit(_one, future, pure=False)
        ends.append(future)
    return sum(client.gather(ends))


def tree(client: Client) -> int:
    """Compute a tree of 1,023 delayed tasks with two inputs each."""
    level: Sequence[Any] = [delayed(_one)(n) for n in range(512)]
    while len(level) > 1:
        level = [delayed(_add)(*level[i : i + 2]) for i in range(0, len(level), 2)]
    (top,) = dask.compute(*level, scheduler=client.get)
    return int(top)


def small_blocks(client: Client) -> int:
    """Compute with an array of 400 blocks of 800 bytes."""
    x = da.ones((200, 200), chunks=(10, 10), dtype="int64")
    return int((x + x.T).sum().compute(scheduler=client.get))


def small_bags(client: Client) -> int:
    """Fold a bag of 300 partitions."""
    bag = db.range(3_000, npartitions=300).map(_one)
    return int(bag.sum().compute(scheduler=client.get))


PROGRAMS: list[Callable[[Client], int]] = [
    one_by_one,
    at_once,
    chains,
    tree,
    small_blocks,
    small_bags,
]


def _processes(client: Client) -> list[psutil.Process]:
    return [psutil.Process(), *map(psutil.Process, client.run(os.getpid).values())]


def _processor_s(processes: Sequence[psutil.Process]) -> list[float]:
    return [used.user + used.system for used in (one.cpu_times() for one in processes)]


def measured(sides: Sides, program: Callable[[Client], int], repeats: int) -> dict[str, Any]:
    """Return medians of all figures on both sides, and of the ratios of runs side by side."""
    processes = {side: _processes(client) for side, client in sides.both()}
    expected = {program(client) for _, client in sides.both()}
    assert len(expected) == 1

    def once(side: str, client: Client) -> dict[str, Any]:
        idle(client)
        before, began = _processor_s(processes[side]), time.perf_counter()
        program(client)
        wall_s = time.perf_counter() - began
        idle(client)
        here, *workers = (
            after - earlier
            for after, earlier in zip(_processor_s(processes[side]), before, strict=True)
        )
        return {"wall_s": wall_s, "scheduler_s": here, "workers_s": sum(workers)}

    _, medians = in_turns(sides, repeats, once, f"{program.__name__}: ")
    return {
        "program": program.__name__,
        **{f"{side}_{figure}": seconds for (side, figure), seconds in medians.items()},
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    found = []
    with two_clusters() as sides:
        for program in PROGRAMS:
            if options.only and options.only not in program.__name__:
                continue
            row = measured(sides, program, options.repeats)
            found.append(row)
            text = f"{row['program']:14s}"
            for figure in ("wall_s", "scheduler_s", "workers_s"):
                stock, enabled = row[f"stock_{figure}"], row[f"enabled_{figure}"]
                text += f"  {figure} {stock:6.3f} {enabled:6.3f} {enabled / max(stock, 1e-3):5.2f}"
            print(text, flush=True)
    write_json(options.json, [], small_tasks=found)


if __name__ == "__main__":
    main()
