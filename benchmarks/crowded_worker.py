"""Seconds of tasks on workers whose memory is mostly taken by something other than values.

Each worker holds a block of memory that nobody manages, as a model or a leak would be. It leaves
room for a few of the values that the tasks use in random pairs. The sides take turns, each with a
cluster of its own. Reads are those of values from disk, for each task.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
from distributed import wait

from benchmarks.harness import arguments, flagged_client, write_json
from dask_gpurt.system_calls import resident_nbytes

MB = 10**6
LIMIT_NBYTES = 400 * MB
#: What the process of a worker takes without values: above `pause` with a quarter of the target.
CROWDED_NBYTES = 265 * MB
#: On each worker; a value has 1 MB.
N_VALUES, N_TASKS = 200, 2_000


def _value(number: int) -> Any:
    return np.full(125_000, float(number))


def _used(one: Any, other: Any) -> float:
    return float(one[0] + other[-1])


def _crowd(dask_worker: Any) -> None:
    missing = CROWDED_NBYTES - resident_nbytes()["all"]
    dask_worker.crowd = np.ones(max(missing, 0), np.uint8)


def _n_reads(dask_worker: Any) -> int:
    return int(dask_worker.data.cumulative_metrics["disk-read", "count"])


def measured(enabled: bool) -> dict[str, float]:
    """Return seconds of all tasks, and reads for each task."""
    rng = random.Random(0)
    with flagged_client(enabled, LIMIT_NBYTES) as client:
        client.run(_crowd)
        pairs = []
        for address in client.scheduler_info(n_workers=-1)["workers"]:
            values = client.map(_value, range(N_VALUES), workers=[address], pure=False)
            wait(values)
            pairs += [(address, rng.choice(values), rng.choice(values)) for _ in range(N_TASKS)]
        before = sum(client.run(_n_reads).values())
        began = time.perf_counter()
        futures = [
            client.submit(_used, one, other, workers=[address], pure=False)
            for address, one, other in pairs
        ]
        wait(futures)
        seconds = time.perf_counter() - began
        return {
            "wall_s": seconds,
            "reads": (sum(client.run(_n_reads).values()) - before) / len(futures),
        }


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    found: dict[str, list[dict[str, float]]] = {"stock": [], "enabled": []}
    for repeat in range(options.repeats):
        for side in sorted(found, reverse=repeat % 2 == 0):
            found[side].append(measured(side == "enabled"))
            row = found[side][-1]
            print(f"{side:8s} {row['wall_s']:6.1f} s, {row['reads']:.2f} reads a task", flush=True)
    medians = {
        side: float(np.median([one["wall_s"] for one in rows])) for side, rows in found.items()
    }
    print(f"ratio {medians['stock'] / medians['enabled']:.2f}")
    write_json(options.json, [], crowded_worker=found)


if __name__ == "__main__":
    main()
