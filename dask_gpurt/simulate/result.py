"""What came of a simulation: when, where, and over which links.

A result compares equal to another exactly if every task and every transfer took place at the same
time in the same place. What the scheduler cost, in processor time, is kept beside and not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TaskRun:
    """One execution of a task that came to its end."""

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
    """Processor time that the scheduler took; not a part of what is simulated.

    Attributes
    ----------
    graph_s
        Taking in the graph and assigning its first tasks.
    messages_s
        Handling what workers said, and what followed from it.
    periodic_s
        Work stealing and whatever else happens by the clock.
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
        Seconds from handing in the graph until the client knew of the last result it wanted.
    tasks
        Executions in the order in which they ended.
    transfers
        Transfers in the order in which they ended.
    link_nbytes
        Bytes over each link that was used.
    peak_nbytes
        The most bytes of results each worker held at a time.
    steals
        Tasks that were moved to another worker after they had been sent to one.
    """

    makespan_s: float
    tasks: tuple[TaskRun, ...]
    transfers: tuple[TransferRun, ...]
    link_nbytes: dict[str, int]
    peak_nbytes: dict[str, int]
    steals: int
    cost: SchedulerCost = field(compare=False, default_factory=SchedulerCost)

    @property
    def moved_nbytes(self) -> int:
        """Bytes from worker to worker."""
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
        """Processor seconds of the scheduler for each task that ran."""
        cost = self.cost
        return (cost.graph_s + cost.messages_s + cost.periodic_s) / max(len(self.tasks), 1)

    def timeline(self) -> list[tuple[float, float, str, str]]:
        """Tasks and transfers as (start, stop, worker, what), by start."""
        rows: Iterable[tuple[float, float, str, str]] = (
            *((task.start_s, task.stop_s, task.worker, task.key) for task in self.tasks),
            *(
                (t.start_s, t.stop_s, t.target, f"{t.nbytes} bytes from {t.source}")
                for t in self.transfers
            ),
        )
        return sorted(rows)
