"""Bytes that reductions with large results move: stock placement, the runtime's, and the least.

The reductions are `sum`, `mean` and `std` of 32 blocks, and `x - x.mean(0)`, on eight workers. The
unit is S, the bytes of a result. Blocks are made in the same graph, or workers hold them already:
where stock Dask or the runtime persisted them, or shuffled. By default workers are simulated; then
times are those of a model.

    python -m benchmarks.trees
    python -m benchmarks.trees --local --mebibytes 16
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import dask.array as da
from dask._task_spec import resolve_aliases
from distributed import wait

from benchmarks.harness import settle, two_clusters, write_json
from benchmarks.placement import received_nbytes
from benchmarks.simulated_placement import POLICIES
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import ClusterModel
from dask_gpurt.simulate.example_clusters import cpu_hosts
from dask_gpurt.simulate.graphs import TaskCost, workload_of
from dask_gpurt.simulate.result import Result
from dask_gpurt.simulate.workload import Workload

N_BLOCKS, N_WORKERS = 32, 8
#: Bytes of a simulated result.
NBYTES = 64 * 2**20
#: Bytes per second that a simulated task makes and reads.
RATE = 2e9


def centred(x: Any) -> Any:
    return x - x.mean(0)


@dataclass(frozen=True)
class Reduction:
    """A reduction of blocks with as many bytes as its result.

    Attributes
    ----------
    least
        Units that have to move if eight workers make four blocks each.
    sizes
        Units of the results of tasks, by prefix; 1 for others. `n` of a mean is a view in the
        first partial results, and an array of its own in later ones.
    """

    compute: Callable[[Any], Any]
    least: int
    sizes: Mapping[str, int]


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(lambda x: x.sum(0), 7, {}),
    "mean": Reduction(lambda x: x.mean(0), 14, {"mean_combine-partial": 2}),
    "std": Reduction(lambda x: x.std(0), 21, {"random-var": 3, "var": 3, "var-partial": 3}),
    "x - mean": Reduction(centred, 21, {"mean_combine-partial": 2}),
}


def blocks(length: int, n_blocks: int = N_BLOCKS) -> Any:
    """Return an array of one block for each row."""
    return da.random.default_rng(1).random((n_blocks, length), chunks=(1, length))


class _Graph:
    """A collection as `compute` submits it: optimized, without tasks that only rename others."""

    def __init__(self, collection: Any) -> None:
        (optimized,) = dask.optimize(collection)
        self._keys = optimized.__dask_keys__()
        tasks = dict(optimized.__dask_graph__())
        dependents: dict[Any, set[Any]] = {key: set() for key in tasks}
        for key, task in tasks.items():
            for needed in task.dependencies:
                dependents[needed].add(key)
        wanted = set(dask.core.flatten(self._keys))
        self._tasks = resolve_aliases(tasks, wanted, dependents)

    def __dask_graph__(self) -> dict[Any, Any]:
        return self._tasks

    def __dask_keys__(self) -> Any:
        return self._keys


def model(name: str, *, persisted: bool, n_blocks: int = N_BLOCKS) -> Workload:
    """Return a reduction as a workload; without fusing sources if they are persisted."""
    reduction = REDUCTIONS[name]
    x = blocks(8, n_blocks)
    if persisted:
        # The key of each source stays, as that of a persisted block does.
        with dask.config.set({"optimization.fuse.active": False}):
            graph = dict(reduction.compute(x).__dask_graph__())
        collection: Any = _Unfused(reduction.compute(x), graph)
    else:
        collection = _Graph(reduction.compute(x))
    costs = {
        prefix: TaskCost(of="nothing", nbytes=units * NBYTES, rate=RATE)
        for prefix, units in {"": 1, **reduction.sizes}.items()
    }
    return workload_of(name, collection, costs)


class _Unfused:
    def __init__(self, collection: Any, graph: dict[Any, Any]) -> None:
        self._keys, self._tasks = collection.__dask_keys__(), graph

    def __dask_graph__(self) -> dict[Any, Any]:
        return self._tasks

    def __dask_keys__(self) -> Any:
        return self._keys


def sources(workload: Workload) -> list[str]:
    """Return the keys of tasks without inputs."""
    return [task.key for task in workload.tasks if not task.dependencies]


def held_by(workload: Workload, where: str, cluster: ClusterModel) -> dict[str, str]:
    """Return the worker of each source: where a policy persists them, or shuffled."""
    keys = sources(workload)
    if where == "shuffled":
        addresses = [one.address for one in cluster.workers] * (len(keys) // N_WORKERS)
        random.Random(1).shuffle(addresses)
        return dict(zip(keys, addresses, strict=True))
    tasks = tuple(task for task in workload.tasks if not task.dependencies)
    made = Workload("x", tasks, tuple(range(len(tasks))))
    result = simulate(made, cluster, POLICIES[where](cluster))
    return {run.key: run.worker for run in result.tasks}


def report(result: Result, held: Mapping[str, str]) -> dict[str, float]:
    """Return the units moved, the seconds, and the busiest worker's share of the mean."""
    received: Counter[str] = Counter()
    for one in result.transfers:
        received[one.target] += one.nbytes
    busy = result.busy_s
    return {
        "moved": result.moved_nbytes / NBYTES,
        "makespan_s": result.makespan_s,
        "busiest": max(busy.values()) / (sum(busy.values()) / len(busy)),
        "received": max(received.values(), default=0) / NBYTES,
    }


def simulated(only: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for hosts, nthreads in ((1, 1), (1, 2), (4, 1), (4, 2), (8, 1), (8, 2)):
        cluster = cpu_hosts(hosts, N_WORKERS // hosts, nthreads=nthreads)
        print(cluster.name)
        for name, reduction in REDUCTIONS.items():
            for where in ("made", "stock", "data-aware", "shuffled"):
                if only not in f"{name}, {where}":
                    continue
                workload = model(name, persisted=where != "made")
                held = {} if where == "made" else held_by(workload, where, cluster)
                row: dict[str, Any] = {"machine": cluster.name, "graph": name, "blocks": where}
                for side in ("stock", "data-aware"):
                    install = POLICIES[side](cluster)
                    row[side] = report(simulate(workload, cluster, install, held=held), held)
                one, other = row["stock"], row["data-aware"]
                print(
                    f"  {name:9} {where:10} stock {one['moved']:6.1f}  runtime"
                    f" {other['moved']:6.1f}  least {reduction.least:3} S"
                    f"  busiest {one['busiest']:4.2f} {other['busiest']:4.2f}"
                    f"  makespan {other['makespan_s'] / one['makespan_s']:5.3f}",
                    flush=True,
                )
                rows.append(row)
    return rows


def local(mebibytes: int, only: str) -> list[dict[str, Any]]:
    """Count bytes on local clusters of eight processes."""
    rows: list[dict[str, Any]] = []
    nbytes = mebibytes * 2**20
    with two_clusters(N_WORKERS) as sides:
        for name, reduction in REDUCTIONS.items():
            for where in ("made", "held"):
                if only not in f"{name}, {where}":
                    continue
                row: dict[str, Any] = {"graph": name, "blocks": where}
                for side, client in sides.both():
                    with client.as_current(), dask.config.set(scheduler=client.get):
                        x = blocks(nbytes // 8)
                        if where == "held":
                            x = client.persist(x)
                            wait(x)
                        received_nbytes(client)
                        began = time.perf_counter()
                        made = client.persist(reduction.compute(x))
                        wait(made)
                        wall_s = time.perf_counter() - began
                        row[side] = {"moved": received_nbytes(client) / nbytes, "wall_s": wall_s}
                        del made, x
                        settle(client)
                print(
                    f"  {name:9} {where:5} stock {row['stock']['moved']:6.1f}  runtime"
                    f" {row['enabled']['moved']:6.1f}  least {reduction.least:3} S"
                    f"  wall {row['enabled']['wall_s'] / row['stock']['wall_s']:5.2f}",
                    flush=True,
                )
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--local", action="store_true", help="use real workers on this machine")
    parser.add_argument("--mebibytes", type=int, default=16, help="size of a result with --local")
    parser.add_argument("--only", default="", help="run only rows with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results here")
    options = parser.parse_args()
    rows = local(options.mebibytes, options.only) if options.local else simulated(options.only)
    if options.json:
        write_json(str(options.json), [], trees=rows)


if __name__ == "__main__":
    main()
