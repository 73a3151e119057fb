"""A minimal cluster for tests: each worker is a host, with one link into a switch and one out.

Numbers are powers of two, so that sums of times are exact in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dask_gpurt.simulate.cluster_model import ClusterModel, Route, WorkerModel
from dask_gpurt.simulate.workload import StableStr, TaskModel, Workload

CONTROL_S = 2.0**-12
LATENCY_S = 2.0**-10
BANDWIDTH = 2.0**30


@dataclass
class FlatNetwork:
    """A network with one link out of each worker, and one link into it."""

    capacities: dict[str, float]

    def route(self, source: str, target: str) -> Route:
        if source == target:
            return Route(0.0, ())
        return Route(LATENCY_S, (f"out {source}", f"in {target}"))


def address(number: int) -> str:
    """Return the address of a worker of a flat cluster."""
    return f"tcp://10.0.0.{number}:40000"


def flat(workers: int, *, nthreads: int = 1, speeds: Sequence[float] = ()) -> ClusterModel:
    """Make a cluster of equal hosts; `speeds` are those of the first workers."""
    models = tuple(
        WorkerModel(address(number), nthreads=nthreads, speed=speed)
        for number, speed in enumerate([*speeds, *[1.0] * (workers - len(speeds))])
    )
    links = {f"{way} {model.address}": BANDWIDTH for model in models for way in ("in", "out")}
    return ClusterModel("flat", models, FlatNetwork(links), control_latency_s=CONTROL_S)


def task(
    key: str, *dependencies: int, s: float = 1.0, nbytes: int = 0, source: bool = False
) -> TaskModel:
    """Return a task; its dependencies are positions in the workload."""
    return TaskModel(StableStr(key), dependencies, s, nbytes, source)


def workload(*tasks: TaskModel, wanted: Sequence[int] = (-1,)) -> Workload:
    """Make a workload; by default, only the result of its last task is wanted."""
    return Workload("test", tasks, tuple(position % len(tasks) for position in wanted))
