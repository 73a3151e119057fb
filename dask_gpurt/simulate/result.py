"""The result of a simulation: times, places and links.

Two results are equal if all tasks and transfers took place at the same times and places. The
processor time of the scheduler is stored too, but not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TaskRun:
    """One completed execution of a task."""

    key: str
    worker: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class TransferRun:
    """One message with results from one worker to another, from request to last byte."""

    keys: tuple[str, ...]
    source: str
    target: str
    start_s: float
    stop_s: float
    nbytes: int


@dataclass
class SchedulerCost:
    """Processor time of the scheduler, which is not part of the simulation.

    Attributes
    ----------
    graph_s
        Adding the graph and assigning its first tasks.
    messages_s
        Handling workers' messages and their consequences.
    periodic_s
        Work stealing and other periodic callbacks.
    """

    graph_s: float = 0.0
    messages_s: float = 0.0
    periodic_s: float = 0.0
    messages: int = 0


@dataclass(frozen=True)
class Result:
    """A simulated computation.

    Attributes
    ----------
    makespan_s
        Seconds from the submission of the graph until the client knows of the last result.
    tasks
        Executions, in the order of their ends.
    transfers
        Transfers, in the order of their ends.
    link_nbytes
        Bytes over each link that was used.
    peak_nbytes
        Peak bytes of results on each worker.
    steals
        Number of tasks moved to another worker after they were sent to one.
    spilled_nbytes
        Bytes that each worker wrote to disk; empty on clusters without disks.
    needed_nbytes
        The most that each worker had to have in memory at once: inputs and outputs of running
        tasks, and shards. Empty on clusters without disks. If it is more than the worker's memory,
        the program does not fit.
    """

    makespan_s: float
    tasks: tuple[TaskRun, ...]
    transfers: tuple[TransferRun, ...]
    link_nbytes: dict[str, int]
    peak_nbytes: dict[str, int]
    steals: int
    spilled_nbytes: dict[str, int] = field(default_factory=dict)
    needed_nbytes: dict[str, int] = field(default_factory=dict)
    cost: SchedulerCost = field(compare=False, default_factory=SchedulerCost)

    @property
    def moved_nbytes(self) -> int:
        """Bytes sent between workers."""
        return sum(transfer.nbytes for transfer in self.transfers)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds in which each worker ran tasks, summed over its threads."""
        busy: dict[str, float] = dict.fromkeys(self.peak_nbytes, 0.0)
        for task in self.tasks:
            busy[task.worker] += task.stop_s - task.start_s
        return busy

    @property
    def scheduler_s_per_task(self) -> float:
        """Processor seconds of the scheduler per task."""
        cost = self.cost
        return (cost.graph_s + cost.messages_s + cost.periodic_s) / max(len(self.tasks), 1)

    def timeline(self) -> list[tuple[float, float, str, str]]:
        """Return tasks and transfers as (start, stop, worker, description), sorted by start."""
        rows: Iterable[tuple[float, float, str, str]] = (
            *((task.start_s, task.stop_s, task.worker, task.key) for task in self.tasks),
            *(
                (t.start_s, t.stop_s, t.target, f"{t.nbytes} bytes from {t.source}")
                for t in self.transfers
            ),
        )
        return sorted(rows)
