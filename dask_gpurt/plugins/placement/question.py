"""Input and output of placement rules: `Question`, `Choice`, `Rule`.

A `Question` is a task to place, with the facts that several rules need. A `Choice` is a worker,
with what the log keeps of the decision. The rules are in `rules` and `least_cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dask_gpurt.placement.cost import Cost
from dask_gpurt.placement.joins import Partners
from dask_gpurt.plugins.placement.live_contractions import Contractions
from dask_gpurt.plugins.placement.scheduler_view import PlacementView

if TYPE_CHECKING:
    from distributed.scheduler import TaskState, WorkerState

_NO_COSTS: Mapping[str, Cost] = {}
#: An input counts as shared only if at least this many tasks need it.
MIN_SHARING = 3


class Choice(NamedTuple):
    """A worker for a task.

    Attributes
    ----------
    worker
        None if no worker may run the task.
    stock
        Address of the worker that stock Dask would choose; None if it was not computed.
    costs
        Costs of the candidates by address, where several were weighed.
    reason
        Reason to log instead of the rule's own.
    """

    worker: WorkerState | None
    stock: str | None
    costs: Mapping[str, Cost] = _NO_COSTS
    reason: str | None = None


def choice_of_stock(ws: WorkerState | None) -> Choice:
    """Return the choice of stock Dask's worker, with stock Dask as the reason."""
    return Choice(ws, address_of(ws), reason="stock")


class Question:
    """A task to place, with the facts that several rules need.

    Each fact is computed when a rule first asks for it.

    Attributes
    ----------
    ts
        The task.
    restricted_to
        Workers that its restrictions allow; None if it may run anywhere.
    """

    __slots__ = (
        "_allowed",
        "_ask_stock",
        "_contractions",
        "_holders",
        "_joins",
        "_main_holder",
        "_sizes",
        "_view",
        "restricted_to",
        "ts",
    )

    def __init__(
        self,
        ts: TaskState,
        restricted_to: set[WorkerState] | None,
        ask_stock: Callable[[TaskState], WorkerState | None],
        view: PlacementView,
        contractions: Contractions,
    ) -> None:
        self.ts = ts
        self.restricted_to = restricted_to
        self._ask_stock = ask_stock
        self._view = view
        self._contractions = contractions
        self._allowed: tuple[Collection[WorkerState] | None] | None = None
        self._holders: list[str] | None = None
        self._joins: list[Partners] | None = None
        self._main_holder: tuple[WorkerState | None] | None = None
        self._sizes: list[int] | None = None

    def stock(self) -> WorkerState | None:
        """Return stock Dask's choice for the task."""
        return self._ask_stock(self.ts)

    @property
    def allowed(self) -> Collection[WorkerState] | None:
        """Workers that the task may go to; None if it may go to any.

        A task of a contraction goes to the host that was planned for it. If all workers there are
        slow, workers of other hosts help.
        """
        if self._allowed is None:
            allowed: Collection[WorkerState] | None = self.restricted_to
            if allowed is None and len(self.ts.dependencies) == 2:
                host = self._contractions.host_of(self.ts)
                if host is not None:
                    here = self._view.running_on(host)
                    if any(self._view.slowness(ws) <= 1 for ws in here):
                        allowed = set(here)
            self._allowed = (allowed,)
        return self._allowed[0]

    @property
    def holders(self) -> list[str]:
        """For each input, the only worker that has it; empty if an input is on several workers."""
        if self._holders is None:
            self._holders = self._view.single_holders(self.ts)
        return self._holders

    @property
    def sizes(self) -> list[int]:
        """Bytes of each input."""
        if self._sizes is None:
            self._sizes = self._view.sizes.observe(self.ts.dependencies)
        return self._sizes

    @property
    def joins(self) -> list[Partners]:
        """For each task that joins this one's output with other results: their bytes by worker."""
        if self._joins is None:
            self._joins = self._view.joins(self.ts)
        return self._joins

    def holder_of_own(self, n_workers: int) -> WorkerState | None:
        """Return the one worker that has all inputs but *shared* ones; None if there is none.

        An input is shared if at least as many tasks need it as there are workers, and at least
        three. Then nearly every worker fetches it anyway. A task's part of these copies must be no
        larger than its other inputs.
        """
        dependencies = self.ts.dependencies
        least = max(n_workers, MIN_SHARING)
        if not any(len(dts.dependents) >= least for dts in dependencies):
            return None
        holder: WorkerState | None = None
        own_nbytes, part_nbytes = 0, 0.0
        for dts, nbytes in zip(dependencies, self.sizes, strict=True):
            n_dependents = len(dts.dependents)
            who = dts.who_has or ()
            if n_dependents >= least:
                part_nbytes += nbytes * n_workers / n_dependents
            elif len(who) != 1 or holder not in (None, *who):
                return None
            else:
                (holder,) = who
                own_nbytes += nbytes
        return holder if own_nbytes >= part_nbytes else None

    @property
    def main_holder(self) -> WorkerState | None:
        """The one worker that has nearly all of the inputs."""
        if self._main_holder is None:
            self._main_holder = (self._view.with_nearly_all(self.ts, self.sizes),)
        return self._main_holder[0]

    @property
    def is_spread_and_new(self) -> bool:
        """Whether no task of the kind has ended, and no worker has nearly all of the inputs."""
        return self._view.is_new(self.ts) and self.main_holder is None


class Rule(Protocol):
    """Chooses a worker for some tasks."""

    @property
    def reason(self) -> str:
        """Key of `dask_gpurt.placement.explanation.REASONS`."""

    def choose(self, question: Question) -> Choice | None:
        """Return a choice; None if the next rule has to be applied."""


def address_of(ws: WorkerState | None) -> str | None:
    """Return a worker's address; None for None."""
    return None if ws is None else ws.address
