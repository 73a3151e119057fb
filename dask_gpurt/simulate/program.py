"""Programs for simulations: a workload, its P2P shuffles, and the order of its computations.

A `Workload` alone is one computation of tasks. A program adds what a client and a shuffle do: it
submits several graphs one after the other, and some of its tasks exchange data among workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from dask_gpurt.errors import WorkloadError
from dask_gpurt.simulate.workload import Workload


@dataclass(frozen=True)
class ExchangeModel:
    """A P2P shuffle. Its transfers send parts to the owners of outputs, and its outputs read them.

    All members but `nbytes` are positions of tasks in the workload.

    Attributes
    ----------
    transfers
        Tasks that cut an input and send its parts.
    barrier
        The task that ends when all parts have arrived. It depends on all transfers.
    outputs
        Tasks that join the parts of a partition, in order of their partitions.
    nbytes
        Bytes of all parts on the link, with those that stay on their worker. If they were
        compressed, the model takes shards in memory to be as small.
    """

    transfers: tuple[int, ...]
    barrier: int
    outputs: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True)
class Submission:
    """A graph that the client submits.

    Attributes
    ----------
    tasks
        Positions of its tasks in the workload.
    wanted
        Positions of the results that the client holds.
    after
        Numbers of earlier submissions whose results the client has before it submits this one.
        Those of the previous submission are implied.
    pause_s
        Seconds of the client since the last of these results, or since the previous submission.
    """

    tasks: tuple[int, ...]
    wanted: tuple[int, ...]
    after: tuple[int, ...] = ()
    pause_s: float = 0.0


@dataclass(frozen=True)
class ProgramModel:
    """A workload with its shuffles and submissions.

    Raises
    ------
    WorkloadError
        A task is in no submission or in two. A task needs one of a later submission. A submission
        waits for a later one, or wants a task of another. An exchange names a task that does not
        exist, or has no outputs.
    """

    workload: Workload
    submissions: tuple[Submission, ...]
    exchanges: tuple[ExchangeModel, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.workload.tasks)
        found = sorted(one for each in self.submissions for one in each.tasks)
        if found != list(range(count)):
            raise WorkloadError(f"{self.workload.name}: each task needs exactly one submission")
        submission_of = self.submission_of()
        for position, task in enumerate(self.workload.tasks):
            mine = submission_of[position]
            if any(submission_of[needed] > mine for needed in task.dependencies):
                raise WorkloadError(f"{task.key}: needs a task that is submitted later")
        for number, each in enumerate(self.submissions):
            if any(not 0 <= other < number for other in each.after):
                raise WorkloadError(f"submission {number} waits for a later one")
            if any(submission_of.get(wanted) != number for wanted in each.wanted):
                raise WorkloadError(f"submission {number} wants a task of another one")
        for exchange in self.exchanges:
            named = (*exchange.transfers, exchange.barrier, *exchange.outputs)
            if not exchange.outputs or not all(0 <= one < count for one in named):
                raise WorkloadError("an exchange has no outputs, or names a task that is not there")

    def submission_of(self) -> dict[int, int]:
        """Return the number of the submission of each task, by its position."""
        return {one: number for number, each in enumerate(self.submissions) for one in each.tasks}

    def released_after(self) -> dict[int, list[int]]:
        """Return the positions that the client releases, by the last submission that needs them.

        A client holds a result until the last submission that needs it has ended.
        """
        submission_of = self.submission_of()
        last = {one: number for number, each in enumerate(self.submissions) for one in each.wanted}
        for position, task in enumerate(self.workload.tasks):
            for needed in task.dependencies:
                if needed in last:
                    last[needed] = max(last[needed], submission_of[position])
        released: dict[int, list[int]] = {}
        for position, number in last.items():
            released.setdefault(number, []).append(position)
        return released

    @classmethod
    def of(cls, workload: Workload) -> ProgramModel:
        """Return the program that submits a workload at once."""
        everything = tuple(range(len(workload.tasks)))
        return cls(workload, (Submission(everything, workload.wanted),))


def next_uses(workload: Workload) -> list[list[int]]:
    """Return for each task the positions of its dependents, the last first, to pop the next one."""
    uses: list[list[int]] = [[] for _ in workload.tasks]
    for position in range(len(workload.tasks) - 1, -1, -1):
        for needed in dict.fromkeys(workload.tasks[position].dependencies):
            uses[needed].append(position)
    return uses
