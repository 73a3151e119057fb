"""Predictions for machines: time, cost, the resource that limits, and how far to trust them.

Each prediction is the median of a few simulations, because small differences of durations change
the result. A simulation of the recorded cluster itself comes first. Its error says how far the
model is from the truth, and widens the range of each prediction.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dask_gpurt.errors import TooLargeError
from dask_gpurt.predict.catalogue import RECORDED, Catalogue, MachineGroup
from dask_gpurt.predict.machine_network import cluster_of, traced_cluster
from dask_gpurt.predict.recorded_program import RecordedProgram
from dask_gpurt.simulate.cluster_model import ClusterModel
from dask_gpurt.simulate.program import ProgramModel
from dask_gpurt.simulate.result import Result

Simulate = Callable[[ProgramModel, ClusterModel], Result]

#: Simulations of each prediction, and how much their tasks' durations differ.
DRAWS, SPREAD = 3, 0.05
#: Above this number of tasks times workers, a prediction is one simulation. It takes ten seconds.
MANY = 100_000
#: A change that saves less is not named.
WORTH_NAMING = 0.97
#: Above this error on its own cluster, a prediction is a guess.
MAX_ERROR = 0.25


@dataclass(frozen=True)
class Change:
    """One resource doubled, and the time then as a share of the time before."""

    name: str
    ratio: float


@dataclass(frozen=True)
class Prediction:
    """The predicted time, cost and use of some machines.

    Attributes
    ----------
    time_s, low_s, high_s
        Median, and the range: of the simulations, widened by the error on the recorded cluster.
    usd
        Cost of the median; None if the price is unknown.
    busy_share
        Share of the threads' time in which tasks computed.
    moved_nbytes, spilled_nbytes
        Bytes sent between machines, and written to disks.
    short_nbytes
        Bytes that the worker with the greatest shortage lacks. Above 0, the program does not fit.
    changes
        Doubled resources that would save time, the most helpful first.
    scheduler_share
        The scheduler's processor time as a share of the whole. Near 1, it would be the limit.
    problem
        Why the program cannot run there; empty if it can. All other figures are 0 then.
    """

    group: MachineGroup
    n_workers: int
    nthreads: int
    time_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    usd: float | None = None
    busy_share: float = 0.0
    moved_nbytes: float = 0.0
    spilled_nbytes: int = 0
    short_nbytes: int = 0
    changes: tuple[Change, ...] = ()
    scheduler_share: float = 0.0
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether no worker needs more memory than it has."""
        return self.short_nbytes <= 0 and not self.problem


@dataclass(frozen=True)
class Predictions:
    """The check against the trace, and the predictions, fastest first; those that fit come first.

    Attributes
    ----------
    measured_s, simulated_s
        Seconds of the program in the trace, and in a simulation of its cluster.
    client_s
        Seconds in which only the client worked. They stay the same everywhere.
    """

    name: str
    measured_s: float
    simulated_s: float
    client_s: float
    speed: float
    rows: tuple[Prediction, ...]

    @property
    def error(self) -> float:
        """Error of the simulation of the recorded cluster, as a share of the measured time."""
        return _error(self.simulated_s, self.measured_s)


def predict(
    recorded: RecordedProgram,
    wanted: Sequence[str],
    catalogue: Catalogue,
    simulate: Simulate,
    *,
    speed: float = 1.0,
    on_simulated: Callable[[str], None] = lambda name: None,
) -> Predictions:
    """Predict a program on machines.

    Parameters
    ----------
    wanted
        Machines, such as "4xm7i.4xlarge"; see `Catalogue.group`.
    simulate
        Runs a simulation.
    speed
        Speed of a thread of the other machines, as a multiple of a recorded one.
    on_simulated
        Called before each simulation, with the name of its machines.

    Raises
    ------
    PredictionError
        A machine is unknown, or there would be too many workers.
    SimulationError
        The program cannot be simulated on the machines of the trace.
    """
    groups = [catalogue.group(one) for one in wanted]
    programs = [_drawn(recorded.program, draw) for draw in range(DRAWS)]
    n_tasks = len(recorded.program.workload.tasks)

    def run(model: ClusterModel, programs: Sequence[ProgramModel]) -> list[Result]:
        results = []
        for program in programs[: 1 if n_tasks * len(model.workers) > MANY else None]:
            on_simulated(model.name)
            results.append(simulate(program, model))
        return results

    simulated_s = _median(run(traced_cluster(recorded.cluster), programs))
    error = abs(_error(simulated_s, recorded.measured_s))
    recorded_work_s = sum(task.duration_s for task in recorded.program.workload.tasks)
    rows = []
    for group in groups:
        own_speed = 1.0 if group.machine.name == RECORDED else speed
        model = cluster_of(group, recorded.cluster, speed=own_speed)
        try:
            results = run(model, programs)
        except TooLargeError as problem:
            rows.append(
                Prediction(
                    group, len(model.workers), model.workers[0].nthreads, problem=str(problem)
                )
            )
            continue
        changes = []
        for name in _worth_asking(results[0]):
            factors = {"speed": own_speed}
            factors[name] = factors.get(name, 1.0) * 2
            # One is enough: it has the same durations as the first of the results.
            better = cluster_of(group, recorded.cluster, **factors)
            (changed,) = run(better, programs[:1])
            changes.append(Change(name, changed.makespan_s / results[0].makespan_s))
        work_s = recorded_work_s / own_speed
        rows.append(_row(model, group, results, error, changes, work_s))
    rows.sort(key=lambda row: (not row.fits, row.time_s))
    return Predictions(
        recorded.program.workload.name,
        recorded.measured_s,
        simulated_s,
        recorded.client_s,
        speed,
        tuple(rows),
    )


def _error(simulated_s: float, measured_s: float) -> float:
    return simulated_s / measured_s - 1 if measured_s else 0.0


def _worth_asking(result: Result) -> list[str]:
    """Return the resources that a simulation used at all."""
    names = ["speed"]
    if _between_hosts(result):
        names.append("network")
    if any(result.spilled_nbytes.values()):
        names += ["memory", "disk"]
    return names


def _row(
    model: ClusterModel,
    group: MachineGroup,
    results: Sequence[Result],
    error: float,
    changes: Sequence[Change],
    work_s: float,
) -> Prediction:
    seconds = [one.makespan_s for one in results]
    middle = sorted(results, key=lambda one: one.makespan_s)[len(results) // 2]
    threads = sum(worker.nthreads for worker in model.workers)
    limits = {worker.address: worker.memory_nbytes for worker in model.workers}
    usd = group.machine.usd_per_hour
    cost = middle.cost
    return Prediction(
        group,
        len(model.workers),
        model.workers[0].nthreads,
        middle.makespan_s,
        min(seconds) * max(1 - error, 0.0),
        max(seconds) * (1 + error),
        None if usd is None else usd * group.count * middle.makespan_s / 3600,
        work_s / (threads * middle.makespan_s) if middle.makespan_s else 0.0,
        _between_hosts(middle),
        sum(middle.spilled_nbytes.values()),
        max(0, *(needed - limits[address] for address, needed in middle.needed_nbytes.items())),
        tuple(
            sorted((one for one in changes if one.ratio < WORTH_NAMING), key=lambda one: one.ratio)
        ),
        (cost.graph_s + cost.messages_s + cost.periodic_s) / middle.makespan_s
        if middle.makespan_s
        else 0.0,
    )


def _between_hosts(result: Result) -> float:
    """Return the bytes that went from one machine to another."""
    return sum(
        one.nbytes
        for one in result.transfers
        if one.source.rpartition(":")[0] != one.target.rpartition(":")[0]
    )


def _median(results: Sequence[Result]) -> float:
    return statistics.median(one.makespan_s for one in results)


def _drawn(program: ProgramModel, draw: int) -> ProgramModel:
    """Return the program with each task a little shorter or longer, the same for the same draw."""
    if not draw:
        return program
    chance = random.Random(draw)
    tasks = tuple(
        replace(task, duration_s=task.duration_s * chance.uniform(1 - SPREAD, 1 + SPREAD))
        for task in program.workload.tasks
    )
    return replace(program, workload=replace(program.workload, tasks=tasks))
