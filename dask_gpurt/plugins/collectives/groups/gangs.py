"""The scheduler's side of groups: which ranks may run together, and the failure that ends a group.

A *gang* is the ranks of one group, one a worker. They run at the same time or not at all:

1. The client asks for the workers (`gpurt_gang_begin`). The gang waits until no other gang has one
   of them. It takes the locks of `distributed.MultiLock` on their addresses, as xgboost does, and
   asks for all at once, so gangs cannot wait for each other in a circle.
2. The client submits a task to each worker. Each waits until all have begun (`gpurt_gang_join`).
3. The gang has ended when all ranks have left, or their tasks or workers are gone.

The first failure ends a group, and is told to all of its ranks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_gpurt.collectives.choice import LinkCosts
from dask_gpurt.errors import ProtocolError
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.collectives.groups.group_messages import LEAST_RATE, LEFT, GroupFailure
from dask_gpurt.plugins.patches.graphs.graph_swap import GraphSwap
from dask_gpurt.plugins.patches.task_placement import fail_task, may_run_anywhere
from dask_gpurt.plugins.patches.worker_messages import WorkerMessages
from dask_gpurt.plugins.weak_handlers import remove_handlers, weak_handlers
from dask_gpurt.shuffle.routing import host_of

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

logger = logging.getLogger("dask_gpurt")

#: Longest time that a program may allow a group to wait.
_MOST_S = 30 * 24 * 3600.0
#: Failures of groups that are kept.
_MOST_PAST = 256
#: Largest count in a report of a rank.
_MOST_COUNTED = 2**60
#: Costs of messages between ranks. The rate is that of an ordinary network, if none is known.
COSTS = LinkCosts(hop_s=1e-3, message_s=2e-4, rate=1.25e9, inside_rate=4e9)


def rank_key(name: str, rank: int) -> str:
    """Return the key of the task of a rank."""
    return f"gpurt-rank-{name}-{rank}"


class Gang:
    """The ranks of one group.

    Parameters
    ----------
    holder
        Worker with a task that waits for this gang and keeps its thread.
    """

    def __init__(
        self, name: str, client: str, workers: Sequence[str], holder: str | None, timeout_s: float
    ) -> None:
        self.name, self.client, self.workers = name, client, list(workers)
        self.holder, self.timeout_s = holder, timeout_s
        self.joined: set[int] = set()
        #: Ranks whose step has ended, or whose worker is gone.
        self.left: set[int] = set()
        #: Ranks whose task has ended.
        self.done: set[int] = set()
        self.failure: GroupFailure | None = None
        #: Bytes a second of links to other hosts, as ranks have measured them before.
        self.rates: list[float] = []
        #: Set when all ranks have joined, or when it is known that they will not.
        self.decided = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        # If the group has failed, ranks that have not begun will never begin.
        is_known = self.failure is not None or len(self.done | self.left) == len(self.workers)
        return is_known and self.joined <= self.left

    def costs(self) -> LinkCosts:
        """Return the costs from which ranks choose algorithms: the slowest link decides."""
        return replace(COSTS, rate=min(self.rates)) if self.rates else COSTS

    def late_text(self) -> str:
        missing = [
            f"rank {rank} at {address}"
            for rank, address in enumerate(self.workers)
            if rank not in self.joined
        ]
        return f"{', '.join(missing)} had no free thread within {self.timeout_s:g} s"


class Gangs(SchedulerPlugin):
    """The gangs of one cluster, until `uninstall`.

    It is a plugin of the scheduler while there are gangs, and sees each transition of a task. At
    other times it costs nothing.

    Parameters
    ----------
    ready
        Addresses of workers that run the runtime.
    reported
        Waits until workers that join have said whether they are ready.
    """

    name = "gpurt-gangs"

    def __init__(
        self,
        scheduler: Scheduler,
        ready: Collection[str],
        reported: Callable[[], Awaitable[None]],
    ) -> None:
        self._scheduler = scheduler
        self._ready, self._reported = ready, reported
        self._gangs: dict[str, Gang] = {}
        #: Failures of groups that have ended, for ranks whose task begins after that.
        self._past: OrderedDict[str, GroupFailure] = OrderedDict()
        self._of_key: dict[Any, tuple[Gang, int]] = {}
        self._telling: set[asyncio.Future[Any]] = set()
        #: Tells of graphs that were refused, while there are gangs.
        self._graphs: GraphSwap | None = None
        self._operations: Counter[str] = Counter()
        self._algorithms: Counter[str] = Counter()
        self._nbytes, self._seconds = 0, 0.0
        methods = self.begin, self.join, self.failed, self.leave, self.wait
        self._handlers = weak_handlers(*methods, prefix="gpurt_gang_")
        scheduler.handlers.update(self._handlers)
        self._messages = WorkerMessages(scheduler, LEFT, self._left)

    def uninstall(self) -> None:
        """End all gangs, and remove the handlers."""
        for gang in list(self._gangs.values()):
            self._fail(gang, GroupFailure("failed", "the runtime was switched off"))
            gang.left.update(gang.joined)
            self._end_if_over(gang)
        remove_handlers(self._scheduler.handlers, self._handlers)
        self._messages.close()

    def report(self) -> dict[str, Any]:
        """Return the operations of all groups that have ended."""
        return {
            "operations": dict(self._operations),
            "algorithms": dict(self._algorithms),
            "nbytes": self._nbytes,
            "seconds": self._seconds,
            "running": len(self._gangs),
        }

    # ------------------------------------------------------------------ handlers

    async def begin(
        self,
        name: str,
        client: str,
        workers: Any,
        timeout_s: float,
        holder: str | None = None,
        caller: Any = None,
    ) -> dict[str, Any]:
        """Handler: wait until a gang may run; return its workers, or why it cannot run.

        Parameters
        ----------
        workers
            Addresses or names of workers, in the order of ranks; None for all workers.
        holder, caller
            The worker whose thread the calling task keeps, and the task's key, if a task calls.
        """
        request_checks.name("client", client)
        if request_checks.name("name", name) in self._gangs:
            raise ProtocolError(f"the gang {name} has begun already")
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= _MOST_S:
            raise ProtocolError(f"timeout_s must be a number of seconds up to {_MOST_S:g}")
        await self._reported()
        try:
            addresses = self._addresses(workers)
        except LookupError as error:
            return _refused(str(error.args[0]))
        if caller is not None and request_checks.key(caller) in self._of_key:
            return _refused("a rank cannot start another gang: it could wait for itself")
        if client not in self._scheduler.clients:
            return _refused(f"the scheduler does not know client {client}")
        gang = Gang(name, client, addresses, holder, float(timeout_s))
        self._add(gang)
        why = self._obstacle(gang) or await self._locked(gang) or self._obstacle(gang)
        if why is not None:
            self._fail(gang, GroupFailure("gang", why))
            return _refused(why)
        return {"why_not": None, "workers": addresses}

    def _addresses(self, workers: Any) -> list[str]:
        """Return the addresses of a gang; raise `LookupError` if it cannot have these workers."""
        known = self._scheduler.workers
        if workers is None:
            found = sorted(known, key=lambda address: (host_of(address), address))
        elif isinstance(workers, (list, tuple)) and len(workers) <= request_checks.MAX_KEYS:
            found = []
            for one in workers:
                address = self._scheduler.aliases.get(one, one)
                if address not in known:
                    raise LookupError(f"there is no worker {str(one)[:100]!r}")
                found.append(str(address))
        else:
            raise ProtocolError("workers must be a list of addresses or names, or None")
        if not found:
            raise LookupError("there is no worker")
        if len(set(found)) < len(found):
            raise LookupError("a worker can be one rank of a gang only")
        return found

    def _obstacle(self, gang: Gang) -> str | None:
        """Return why the ranks of a gang cannot run at the same time."""
        if gang.failure is not None:
            return gang.failure.text
        keepers = Counter(one.holder for one in self._gangs.values())
        for rank, address in enumerate(gang.workers):
            ws = self._scheduler.workers.get(address)
            if ws is None:
                return f"the worker of rank {rank} at {address} is gone"
            if address not in self._ready:
                return f"dask_gpurt does not run on the worker at {address}"
            if ws.status != Status.running:
                return f"the worker of rank {rank} at {address} is {ws.status.name}"
            if ws.nthreads <= keepers[address]:
                why = (
                    f"tasks that wait for a group keep {keepers[address]} of them; call"
                    " distributed.secede() in those tasks first, or give the worker more threads"
                    if keepers[address]
                    else "it needs one for its rank"
                )
                return f"the worker at {address} has {ws.nthreads} threads, and {why}"
        return None

    async def _locked(self, gang: Gang) -> str | None:
        """Wait for gangs on the same workers; return a reason if this one ends meanwhile."""
        acquire = self._scheduler.handlers["multi_lock_acquire"]
        n_locks = len(gang.workers)
        locking = asyncio.ensure_future(
            acquire(locks=gang.workers, id=gang.name, num_locks=n_locks)
        )
        failing = asyncio.ensure_future(gang.decided.wait())
        try:
            await asyncio.wait({locking, failing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            locking.cancel()
            failing.cancel()
            await asyncio.wait({locking, failing})
        return None if gang.failure is None else gang.failure.text

    async def join(
        self, name: str, rank: int, worker: str, rate: float | None = None
    ) -> dict[str, Any]:
        """Handler: a rank has begun; answer when all have, or with the reason why not all do.

        Parameters
        ----------
        rate
            Bytes a second of the worker's slowest link to another host, if it has measured one.
        """
        if rate is not None and not (type(rate) is float and LEAST_RATE <= rate <= _MOST_COUNTED):
            raise ProtocolError("rate must be a number of bytes a second")
        gang = self._gangs.get(request_checks.name("name", name))
        if gang is None:
            text = "the group of this rank has ended; call `run` again for another one"
            return {"failure": self._past.get(name, GroupFailure("gang", text)).plain()}
        if gang.workers[self._rank(gang, rank)] not in self._scheduler.workers:
            # Its worker is gone, and its task came to another one.
            lost = GroupFailure("lost", rank=rank, address=gang.workers[rank])
            return {"failure": (gang.failure or lost).plain()}
        if rank in gang.joined or gang.workers[rank] != worker:
            raise ProtocolError(f"{worker} cannot join as rank {rank}")
        gang.joined.add(rank)
        gang.rates += [] if rate is None else [rate]
        if len(gang.joined) == len(gang.workers):
            gang.decided.set()
        try:
            async with asyncio.timeout(gang.timeout_s):
                await gang.decided.wait()
        except TimeoutError:
            self._fail(gang, GroupFailure("gang", gang.late_text()))
        failure = None if gang.failure is None else gang.failure.plain()
        return {
            "failure": failure,
            "workers": gang.workers,
            "costs": asdict(gang.costs()),
            "timeout_s": gang.timeout_s,
        }

    async def failed(self, name: str, rank: int, failure: Any) -> dict[str, Any]:
        """Handler: a rank has failed; return the failure of its group, maybe an older one."""
        found = GroupFailure.checked(failure)
        gang = self._gangs.get(request_checks.name("name", name))
        if gang is None:
            return found.plain()
        self._rank(gang, rank)
        self._fail(gang, found)
        return (gang.failure or found).plain()

    async def leave(
        self, name: str, rank: int, failure: Any = None, counts: Any = None
    ) -> dict[str, Any]:
        """Handler: the step of a rank has ended."""
        gang = self._gangs.get(request_checks.name("name", name))
        if gang is not None and self._rank(gang, rank) not in gang.left:
            if failure is not None:
                self._fail(gang, GroupFailure.checked(failure))
            if rank == 0 and counts:
                self._count(counts)
            gang.left.add(rank)
            self._end_if_over(gang)
        return {}

    def _left(self, name: Any, rank: Any, worker: str) -> None:
        """Handle the message that the step of a rank has ended, whose worker got no answer."""
        # An error would close the worker's connection.
        gang = self._gangs.get(name) if isinstance(name, str) else None
        if gang is not None and worker in gang.workers and rank == gang.workers.index(worker):
            gang.left.add(rank)
            self._end_if_over(gang)

    async def wait(self, names: Any, cancel: bool) -> dict[str, Any]:
        """Handler: answer when these gangs have ended; with `cancel`, end them."""
        gangs = [gang for name in request_checks.keys(names) if (gang := self._gangs.get(name))]
        for gang in gangs:
            if request_checks.flag("cancel", cancel):
                self._fail(gang, GroupFailure("failed", "the client has cancelled the run"))
        for gang in gangs:
            await gang.ended.wait()
        return {}

    @staticmethod
    def _rank(gang: Gang, rank: Any) -> int:
        if type(rank) is not int or not 0 <= rank < len(gang.workers):
            raise ProtocolError(f"there is no rank {rank!r} among {len(gang.workers)}")
        return rank

    def _count(self, counts: Any) -> None:
        if not isinstance(counts, Mapping):
            raise ProtocolError("counts of a rank must be a mapping")
        for total, name in ((self._operations, "operations"), (self._algorithms, "algorithms")):
            found = counts.get(name)
            if not isinstance(found, Mapping) or len(found) > 16:
                raise ProtocolError(f"{name} of a rank must be a short mapping")
            for key, n in found.items():
                total[request_checks.name(name, key)] += _counted(n)
        self._nbytes += _counted(counts.get("nbytes"))
        seconds = counts.get("seconds")
        if type(seconds) is not float or not 0 <= seconds < _MOST_COUNTED:
            raise ProtocolError("seconds of a rank must be a number")
        self._seconds += seconds

    # ------------------------------------------------------------------ life

    def _add(self, gang: Gang) -> None:
        if not self._gangs:
            self._scheduler.add_plugin(self, name=self.name)
            self._graphs = GraphSwap(self._scheduler, handled=self._graph_handled)
        self._gangs[gang.name] = gang
        for rank in range(len(gang.workers)):
            self._of_key[rank_key(gang.name, rank)] = gang, rank

    def _end_if_over(self, gang: Gang) -> None:
        if gang.ended.is_set() or not gang.has_ended:
            return
        gang.ended.set()
        gang.decided.set()
        del self._gangs[gang.name]
        for rank in range(len(gang.workers)):
            del self._of_key[rank_key(gang.name, rank)]
            self._loosen(gang, rank)
        # Asked for or held: `release` takes back either, and fails if there is neither.
        if gang.name in self._scheduler.extensions["multi_locks"].requests:
            self._scheduler.handlers["multi_lock_release"](id=gang.name)
        if not self._gangs:
            assert self._graphs is not None
            self._graphs.uninstall()
            self._scheduler.remove_plugin(self.name)

    def _loosen(self, gang: Gang, rank: int) -> TaskState | None:
        """Let the task of a rank run elsewhere: it gets an error there, as do its dependents."""
        ts = self._scheduler.tasks.get(rank_key(gang.name, rank))
        if ts is not None:
            may_run_anywhere(ts)
        return ts

    def _fail(self, gang: Gang, failure: GroupFailure) -> None:
        """End a group, unless it has failed already, and tell its ranks."""
        if gang.failure is not None:
            return
        gang.failure = failure
        self._past[gang.name] = failure
        if len(self._past) > _MOST_PAST:
            self._past.popitem(last=False)
        was_decided = gang.decided.is_set()
        gang.decided.set()
        if was_decided:
            for rank in gang.joined - gang.left:
                telling = asyncio.ensure_future(self._tell(gang.workers[rank], gang.name, failure))
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)
        self._end_if_over(gang)

    async def _tell(self, address: str, name: str, failure: GroupFailure) -> None:
        try:
            await self._scheduler.rpc(address).gpurt_collective_abort(
                name=name, failure=failure.plain()
            )
        except Exception as error:
            logger.info("%s was not told that its group has ended: %s", address, error)

    # ------------------------------------------------------------------ events of the scheduler

    def _graph_handled(self, keys: Collection[Any]) -> None:
        """Note the ranks whose graph the scheduler refused: no task of theirs will ever end."""
        for key in keys:
            if key not in self._of_key or key in self._scheduler.tasks:
                continue
            gang, rank = self._of_key[key]
            text = (
                f"rank {rank} at {gang.workers[rank]} cannot begin: one of its inputs was cancelled"
                " or lost, or cannot be loaded on the scheduler"
            )
            self._fail(gang, GroupFailure("gang", text))

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Note the end of a rank's task. distributed calls this."""
        if key not in self._of_key or finish not in ("memory", "erred", "released", "forgotten"):
            return
        gang, rank = self._of_key[key]
        if rank in gang.done:
            return
        address = gang.workers[rank]
        if address not in self._scheduler.workers:
            return  # `remove_worker` follows
        gang.done.add(rank)
        if finish == "erred":
            ts = self._scheduler.tasks.get(key)
            why = "" if ts is None else str(ts.exception_text)[:1000]
            kind, what = ("failed", "failed") if rank in gang.joined else ("gang", "cannot begin")
            self._fail(gang, GroupFailure(kind, f"rank {rank} at {address} {what}: {why}"))
        if finish in ("memory", "erred") and rank in gang.joined:
            # Its step has ended. It may not have been heard leaving.
            gang.left.add(rank)
        if finish in ("released", "forgotten"):
            self._fail(gang, GroupFailure("failed", f"the task of rank {rank} was cancelled"))
        self._end_if_over(gang)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Note that the worker of a rank is gone. distributed calls this."""
        for gang in list(self._gangs.values()):
            if worker not in gang.workers:
                continue
            rank = gang.workers.index(worker)
            if rank not in gang.left:
                gang.left.add(rank)
                failure = GroupFailure("lost", rank=rank, address=worker)
                self._fail(gang, failure)
                ts = scheduler.tasks.get(rank_key(gang.name, rank))
                if ts is not None and ts.state not in ("memory", "erred"):
                    # Not cancelled: `Client.gather` would then raise `CancelledError`.
                    fail_task(scheduler, ts, failure.error(), "gpurt-rank-lost")
            ts = self._loosen(gang, rank)
            if ts is not None and ts.state == "no-worker":
                scheduler.transitions({ts.key: "processing"}, stimulus_id="gpurt-rank-lost")
            self._end_if_over(gang)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the gangs of a client that leaves. distributed calls this."""
        for gang in [one for one in self._gangs.values() if one.client == client]:
            self._fail(gang, GroupFailure("failed", f"client {client} has left"))


def _refused(why: str) -> dict[str, Any]:
    return {"why_not": why, "workers": []}


def _counted(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_COUNTED:
        raise ProtocolError("a count of a rank must be a number")
    return value
