"""Makespans of simulated computations, with stock placement and with a policy, on four machines.

distributed's own scheduler drives modelled workers in virtual time. Runs are deterministic:
`--policy stock` checks that two runs of stock are equal. But a microsecond can change the order of
two tasks, and with it the rest of a run, so one run says little. Each graph is simulated several
times, with tasks a little shorter or longer, in the same way on both sides. The result is the
median of the ratios.

With `--workers`, the benchmark measures real processor time of the scheduler instead, on one
cluster with that many workers.

docs/simulator.md describes the models.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distributed import Scheduler

from benchmarks.held_out_graphs import HELD_OUT
from dask_gpurt.plugins.simulation.simulated_run import Install, simulate
from dask_gpurt.simulate.cluster_model import ChangesSpeed, ClusterModel, Dies, Incident
from dask_gpurt.simulate.example_clusters import nvlink_hosts, one_slow_nic, pcie_gpus
from dask_gpurt.simulate.examples import EXAMPLES, Scale, joins, matmul, stencil
from dask_gpurt.simulate.result import Result
from dask_gpurt.simulate.workload import Workload
from dask_gpurt.topology.model import Topology


def twice_the_hosts() -> ClusterModel:
    return nvlink_hosts(16, 8)


#: Machines, each with a scale of examples that fits it: about four blocks for each worker, and the
#: rates of GPUs or of processors.
MACHINES: tuple[tuple[Callable[[], ClusterModel], Scale], ...] = (
    (nvlink_hosts, Scale(side=16, block_nbytes=500_000_000, load_rate=5e9, rate=100e9)),
    (pcie_gpus, Scale(side=8, block_nbytes=500_000_000, load_rate=5e9, rate=100e9)),
    (one_slow_nic, Scale(side=12, block_nbytes=100_000_000, load_rate=0.5e9, rate=2e9)),
    # Fewer blocks than workers: what is joined may well be on different hosts.
    (twice_the_hosts, Scale(side=8, block_nbytes=500_000_000, load_rate=5e9, rate=100e9)),
)

#: Largest change of a task's duration in a draw, as a share of the duration.
JITTER = 1e-3


def stock(cluster: ClusterModel) -> Install | None:
    """Install nothing: stock Dask."""
    return None


def data_aware(
    described: Callable[[Topology], Topology | None],
) -> Callable[[ClusterModel], Install]:
    """Return an installer of the policy of `gpurt.placement`.

    Parameters
    ----------
    described
        Returns what placement is told of the machines, from the whole truth.
    """
    from dask_gpurt.plugins.placement.placer import Placement

    def of_cluster(cluster: ClusterModel) -> Install:
        truth = getattr(cluster.network, "topology", None)
        told = truth and described(truth)

        def install(scheduler: Scheduler) -> None:
            clock = asyncio.get_running_loop().time
            Placement(scheduler, "data-aware", told, clock=clock)

        return install

    return of_cluster


POLICIES: dict[str, Callable[[ClusterModel], Install | None]] = {
    "stock": stock,
    "data-aware": data_aware(lambda truth: truth),
    "data-aware-untold": data_aware(lambda truth: None),
    "data-aware-discovered": data_aware(lambda truth: truth.as_reported()),
}


@dataclass
class Row:
    """Results of one example on one cluster: several draws, each with stock and with the policy."""

    cluster: str
    workload: str
    tasks: int
    stock: list[Result]
    policy: list[Result]

    @property
    def ratios(self) -> list[float]:
        """Ratios of makespans, policy to stock, in ascending order."""
        pairs = zip(self.policy, self.stock, strict=True)
        return sorted(policy.makespan_s / stock.makespan_s for policy, stock in pairs)

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def line(self) -> str:
        sides = "  ".join(
            f"{side} {_median(results, 'makespan_s'):8.3f} s"
            f" {_median(results, 'moved_nbytes') / 1e9:8.1f} GB"
            for side, results in (("stock", self.stock), ("policy", self.policy))
        )
        spread = f"({self.ratios[0]:5.3f} to {self.ratios[-1]:5.3f})"
        return f"  {self.workload:26} {self.tasks:6} tasks  {sides}  {self.ratio:5.3f} {spread}"

    def plain(self) -> dict[str, Any]:
        return {
            "machine": self.cluster,
            "workload": self.workload,
            "tasks": self.tasks,
            "ratio": self.ratio,
            "ratios": self.ratios,
            **{
                f"{side}_{what}": _median(results, what)
                for side, results in (("stock", self.stock), ("policy", self.policy))
                for what in ("makespan_s", "moved_nbytes", "scheduler_s_per_task")
            },
        }


def _median(results: list[Result], what: str) -> float:
    return statistics.median(getattr(result, what) for result in results)


def drawn(model: Workload, number: int) -> Workload:
    """Return the workload with each task a little shorter or longer; `number` is the seed."""
    draw = random.Random(number)
    return replace(
        model,
        tasks=tuple(
            replace(task, duration_s=task.duration_s * draw.uniform(1 - JITTER, 1 + JITTER))
            for task in model.tasks
        ),
    )


def compare(model: Workload, cluster: ClusterModel, policy: str, draws: int) -> Row:
    """Simulate a workload on a cluster with stock placement and with the policy."""
    row = Row(cluster.name, model.name, len(model.tasks), [], [])
    for number in range(1, draws + 1):
        run = drawn(model, number)
        one = simulate(run, cluster)
        other = simulate(run, cluster, POLICIES[policy](cluster))
        assert {task.key for task in one.tasks} == {task.key for task in other.tasks}
        if policy == "stock":
            assert one == other, f"{model.name}: the simulation is not deterministic"
        row.stock.append(one)
        row.policy.append(other)
    print(row.line(), flush=True)
    return row


def compare_all(policy: str, only: str, share: float, seeds: int, draws: int) -> list[Row]:
    """Compare every example on every cluster, or every held-out graph if there are seeds."""
    rows: list[Row] = []
    for cluster, models in _examples(only, share, seeds):
        print(f"{cluster.name}, {policy} against stock", flush=True)
        here = [compare(model, cluster, policy, draws) for model in models]
        ratios = [row.ratio for row in here]
        mean = statistics.geometric_mean(ratios)
        print(f"  geometric mean {mean:.3f}, worst {max(ratios):.3f}", flush=True)
        rows += here
    return rows


#: Incidents of the first worker by name; each takes its address and a time.
INCIDENTS: dict[str, Callable[[str, float], Incident]] = {
    "slow": lambda address, at_s: ChangesSpeed(address, at_s, speed=0.2),
    "gone": Dies,
}


def bad_days(policy: str, only: str, share: float) -> list[dict[str, Any]]:
    """Simulate every example with an incident of one worker after 40 % of the healthy makespan."""
    found = []
    for cluster, models in _examples(only, share):
        print(f"{cluster.name}, {policy}, one worker in trouble", flush=True)
        for model in models:
            healthy = simulate(model, cluster, POLICIES[policy](cluster))
            for what, incident in INCIDENTS.items():
                address = cluster.workers[0].address
                bad = cluster.with_incidents(incident(address, 0.4 * healthy.makespan_s))
                result = simulate(model, bad, POLICIES[policy](bad))
                assert {run.key for run in result.tasks} == {run.key for run in healthy.tasks}
                ratio = result.makespan_s / healthy.makespan_s
                print(
                    f"  {model.name:26} healthy {healthy.makespan_s:8.3f} s"
                    f"  {what} {result.makespan_s:8.3f} s  ratio {ratio:5.3f}",
                    flush=True,
                )
                found.append(
                    {
                        "machine": cluster.name,
                        "workload": model.name,
                        "incident": what,
                        "healthy_s": healthy.makespan_s,
                        "makespan_s": result.makespan_s,
                        "ratio": ratio,
                    }
                )
    return found


def _examples(
    only: str, share: float, seeds: int = 0
) -> Iterator[tuple[ClusterModel, list[Workload]]]:
    """Yield each cluster with its graphs; `share` scales the number of blocks along an edge."""
    for make_cluster, scale in MACHINES:
        cluster = make_cluster()
        side = max(2, round(scale.side * share))
        fitting = Scale(side, scale.block_nbytes, scale.load_rate, scale.rate)
        if seeds:
            models = [one(fitting, seed) for one in HELD_OUT for seed in range(1, seeds + 1)]
        else:
            models = [example(fitting) for example in EXAMPLES]
        chosen = [m for m in models if only in m.name or only in cluster.name]
        if chosen:
            yield cluster, chosen


def time_scheduler(workers: int, policy: str, repeats: int) -> dict[str, Any]:
    """Processor time of the scheduler for each task, at a size that few have."""
    cluster = nvlink_hosts(math.ceil(workers / 8), 8)
    edge = (4 * workers) ** 0.5
    print(f"{cluster.name}: scheduler time, {policy} against stock", flush=True)
    found: dict[str, Any] = {"workers": len(cluster.workers), "policy": policy, "workloads": {}}
    for example in EXAMPLES:
        # There are about four blocks for each worker, or fewer if a block has many tasks.
        shares: dict[Any, float] = {matmul: 0.63, stencil: 0.5, joins: 0.38}
        share = shares.get(example, 1.0)
        model = example(
            Scale(side=round(share * edge), block_nbytes=100_000_000, load_rate=1e9, rate=20e9)
        )
        taken: dict[str, list[float]] = {"stock": [], "policy": []}
        for _ in range(repeats):
            for side, name in (("stock", "stock"), ("policy", policy)):
                # Otherwise garbage of the simulation would be collected in the scheduler's time.
                gc.collect()
                gc.disable()
                result = simulate(model, cluster, POLICIES[name](cluster))
                gc.enable()
                taken[side].append(result.scheduler_s_per_task)
        # Ratios are of neighbouring runs, because load on the machine changes times by a third.
        ratio = statistics.median(
            other / one for one, other in zip(taken["stock"], taken["policy"], strict=True)
        )
        one, other = statistics.median(taken["stock"]), statistics.median(taken["policy"])
        print(
            f"  {model.name:26} {len(model.tasks):6} tasks  stock {one * 1e6:6.0f} us a task"
            f"  policy {other * 1e6:6.0f} us a task  ratio {ratio:5.3f}",
            flush=True,
        )
        found["workloads"][model.name] = {**taken, "tasks": len(model.tasks), "ratio": ratio}
    ratios = [one["ratio"] for one in found["workloads"].values()]
    found["ratio"] = statistics.geometric_mean(ratios)
    print(f"  geometric mean {found['ratio']:5.3f}, greatest {max(ratios):5.3f}")
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=POLICIES, default="stock")
    parser.add_argument(
        "--only", default="", help="run only workloads or machines with this in their name"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the number of blocks along an edge"
    )
    parser.add_argument("--workers", type=int, help="measure scheduler time with this many workers")
    parser.add_argument(
        "--bad-days", action="store_true", help="slow down or remove a worker instead of comparing"
    )
    parser.add_argument(
        "--held-out", type=int, default=0, metavar="SEEDS", help="use held-out graphs, with seeds"
    )
    parser.add_argument("--draws", type=int, default=5, help="simulated runs of each graph")
    parser.add_argument("--repeats", type=int, default=3, help="runs with `--workers`")
    parser.add_argument("--json", metavar="FILE", help="write results here")
    chosen = parser.parse_args(arguments)
    found: Any
    if chosen.bad_days:
        found = bad_days(chosen.policy, chosen.only, chosen.scale)
    elif chosen.workers:
        found = time_scheduler(chosen.workers, chosen.policy, chosen.repeats)
    else:
        found = [
            row.plain()
            for row in compare_all(
                chosen.policy, chosen.only, chosen.scale, chosen.held_out, chosen.draws
            )
        ]
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
