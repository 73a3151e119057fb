"""Private names of distributed that placement uses or replaces.

The other private names are in the modules beside this one. Contract tests in
`tests/plugins/patches/test_task_placement.py` fail when distributed moves any of these.

| what | why | taken back by |
|---|---|---|
| `Scheduler.decide_worker_non_rootish`, `.decide_worker_rootish_queuing_disabled`,
`.decide_worker_rootish_queuing_enabled` | choose the worker of a task that can run
| `DecisionSwap.uninstall` |
| `Scheduler._TRANSITIONS_TABLE` | the last of those is not told which task it decides for; how
long a task took, and on which worker | `DecisionSwap.uninstall` |
| `Scheduler.stimulus_queue_slots_maybe_opened` | choose which queued task gets a free slot; ask
once about a task that stays in the queue, not once per slot | `DecisionSwap.uninstall` |
| `WorkStealing._get_thief` | choose or refuse a thief by what it has to fetch
| `DecisionSwap.uninstall` |
| `WorkStealing._combined_occupancy` | the same work takes a slow worker longer
| `DecisionSwap.uninstall` |
| `WorkStealing.balance`, `Scheduler.periodic_callbacks` | steal sooner than once a second, if
stealing is on | |
| handler `heartbeat_worker` | it carries the rates of transfers between pairs of workers
| `DecisionSwap.uninstall` |
| `Scheduler.transition`, `.transitions`, `TaskState.exception`, `.exception_text`,
`.exception_blame`, `.waiters` | a task fails with its group | |
| `Scheduler._get_prefix_duration` | how long a task is expected to take | |
| `Scheduler.idle` is a sorted dict | read as a plain one, and for the workers of a host | |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from distributed.protocol.pickle import dumps
from distributed.scheduler import _task_slots_available

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState

    from dask_gpurt.plugins.placement.placer import Placement

T = TypeVar("T")


#: Limit of workers that are scanned per root task before stock Dask scans all of them.
_MAX_SCANNED = 32


def _least_busy(scheduler: Scheduler) -> WorkerState | None:
    """Return the worker with the fewest tasks among those with a free slot, as stock Dask does.

    Return None if no worker has a free slot, or if finding it takes a long scan.
    """
    spare, idle = scheduler.idle_task_count, scheduler.idle
    if not spare:
        return None
    # In the order of stock Dask's scan. In the order of addresses, tasks would crowd on few hosts.
    found = next((ws for ws in spare if not ws.processing), None)
    if found is not None:
        return found
    if len(idle) > _MAX_SCANNED:
        return None
    # All workers with a free thread are among these; others have a task per thread at least.
    free = [ws for ws in idle.values() if len(ws.processing) < ws.nthreads and ws in spare]
    if free:
        return min(free, key=lambda ws: len(ws.processing) / ws.nthreads)
    return next(
        (ws for ws in islice(spare, _MAX_SCANNED) if len(ws.processing) == ws.nthreads), None
    )


class DecisionSwap:
    """Makes a `Placement` decide where tasks go, on a live scheduler.

    Its methods are given stock Dask's decision, or can call for it. The scheduler uses their answer
    as its own, so they have to respect restrictions. If one raises, stock Dask's answer is used.
    Otherwise the error would stop a transition half-way, and corrupt the scheduler's state for
    every client.
    """

    def __init__(self, scheduler: Scheduler, placer: Placement) -> None:
        self._scheduler = scheduler
        self._placer = placer
        self._stealing: Any = scheduler.extensions.get("stealing")
        self._stock_heartbeat = scheduler.handlers["heartbeat_worker"]
        #: Key of the task about to begin: the scheduler does not pass it to the decision.
        self._deciding: Any = None
        self._replace_decisions()
        self._replace_transitions()
        self._replace_heartbeat()
        if self._stealing is not None:
            self._replace_stealing()

    def _guarded(self, call: Callable[..., T], otherwise: Callable[..., T]) -> Callable[..., T]:
        """Return `call` with a fallback to `otherwise` if it raises."""
        failed = self._placer.failed

        def guarded(*args: Any) -> T:
            try:
                return call(*args)
            except Exception as error:
                failed(error)
                return otherwise(*args)

        return guarded

    def _replace_decisions(self) -> None:
        scheduler, placer = self._scheduler, self._placer
        stock_place = scheduler.decide_worker_non_rootish
        stock_root = scheduler.decide_worker_rootish_queuing_disabled
        stock_queued_root = scheduler.decide_worker_rootish_queuing_enabled
        place = self._guarded(lambda ts: placer.place(ts, stock_place), stock_place)
        root = self._guarded(placer.place_root, lambda ts, found: found)
        queued = self._guarded(placer.queued, lambda ts: None)
        next_root = self._guarded(placer.next_root, lambda front: front)

        def place_root(ts: TaskState) -> WorkerState | None:
            found = stock_root(ts)
            # Without a queue, None would mean that no worker may run the task.
            return None if found is None else root(ts, found) or found

        def place_queued_root() -> WorkerState | None:
            found: WorkerState | None = _least_busy(scheduler) or stock_queued_root()
            ts = scheduler.tasks.get(self._deciding)
            if ts is None:
                return found
            if found is None:
                if ts.state == "waiting":
                    queued(ts)
                return None
            chosen: WorkerState | None = root(ts, found)
            return chosen

        def open_slots(*, stimulus_id: str) -> None:
            if not scheduler.queued:
                return
            saturation = scheduler.WORKER_SATURATION
            spare = scheduler.idle_task_count
            for _ in range(sum(_task_slots_available(ws, saturation) for ws in spare)):
                if not scheduler.queued:
                    return
                first = next_root(scheduler.queued.peek())
                if first is None:
                    return
                scheduler.transitions({first.key: "processing"}, stimulus_id)
                if first.state == "queued":
                    return  # asking again would give the same answer

        scheduler.decide_worker_non_rootish = place  # type: ignore[method-assign]
        scheduler.decide_worker_rootish_queuing_disabled = place_root  # type: ignore[method-assign]
        scheduler.decide_worker_rootish_queuing_enabled = place_queued_root  # type: ignore[method-assign]
        scheduler.stimulus_queue_slots_maybe_opened = open_slots  # type: ignore[method-assign]

    def _replace_transitions(self) -> None:
        stock_table = self._scheduler._TRANSITIONS_TABLE
        stock_ending = stock_table["processing", "memory"]

        def noting(transition: Callable[..., Any]) -> Callable[..., Any]:
            # These transitions do not call one another, so the last key is enough.
            def noted(state: Any, key: Any, stimulus_id: str, **kwargs: Any) -> Any:
                self._deciding = key
                return transition(state, key, stimulus_id, **kwargs)

            return noted

        def computed(ts: TaskState, message: Mapping[str, Any]) -> None:
            seconds = 0.0
            for one in message["startstops"]:
                if one["action"] == "compute":
                    seconds += one["stop"] - one["start"]
            self._placer.ended(ts, message["worker"], seconds)

        tell_ended = self._guarded(computed, lambda ts, message: None)

        def ending(state: Any, key: Any, stimulus_id: str, **kwargs: Any) -> Any:
            ts = state.tasks[key]
            answer = stock_ending(state, key, stimulus_id, **kwargs)
            tell_ended(ts, kwargs)
            return answer

        self._scheduler._TRANSITIONS_TABLE = {  # type: ignore[misc]
            **stock_table,
            ("waiting", "processing"): noting(stock_table["waiting", "processing"]),
            ("queued", "processing"): noting(stock_table["queued", "processing"]),
            ("processing", "memory"): ending,
        }

    def _replace_heartbeat(self) -> None:
        placer, stock_heartbeat = self._placer, self._stock_heartbeat
        observe = self._guarded(
            lambda address, metrics: placer.observe(address, metrics["bandwidth"]["workers"]),
            lambda address, metrics: None,
        )

        def heartbeat(*, address: str, metrics: dict[str, Any], **kwargs: Any) -> Any:
            answer = stock_heartbeat(address=address, metrics=metrics, **kwargs)
            observe(address, metrics)
            return answer

        self._heartbeat = self._scheduler.handlers["heartbeat_worker"] = heartbeat

    def _replace_stealing(self) -> None:
        placer, stealing = self._placer, self._stealing
        stock_thief = stealing._get_thief
        stock_occupancy_s = stealing._combined_occupancy
        slowness = self._guarded(placer.slowness, lambda ws: 1.0)
        choose_thief = self._guarded(
            placer.choose_thief, lambda ts, found, thieves, occupancy_s: found
        )

        def combined_occupancy_s(ws: WorkerState, *, occupancies: Any) -> float:
            found_s: float = stock_occupancy_s(ws, occupancies=occupancies)
            return found_s * slowness(ws) if found_s else found_s

        def get_thief(state: Any, ts: Any, thieves: Any, *, occupancies: Any) -> Any:
            found = stock_thief(state, ts, thieves, occupancies=occupancies)
            if found is None:
                return None
            occupancy_s = partial(stock_occupancy_s, occupancies=occupancies)
            return choose_thief(ts, found, thieves, occupancy_s)

        stealing._get_thief = get_thief
        stealing._combined_occupancy = combined_occupancy_s

    def balance(self) -> None:
        """Make stock Dask look for tasks to steal now, if stealing is on."""
        if self._stealing is not None and "stealing" in self._scheduler.periodic_callbacks:
            self._stealing.balance()

    def uninstall(self) -> None:
        """Put stock Dask's own functions back."""
        for name in (
            "decide_worker_non_rootish",
            "decide_worker_rootish_queuing_disabled",
            "decide_worker_rootish_queuing_enabled",
            "stimulus_queue_slots_maybe_opened",
            "_TRANSITIONS_TABLE",
        ):
            vars(self._scheduler).pop(name, None)
        if self._scheduler.handlers["heartbeat_worker"] is self._heartbeat:  # no other is around it
            self._scheduler.handlers["heartbeat_worker"] = self._stock_heartbeat
        if self._stealing is not None:
            vars(self._stealing).pop("_get_thief", None)
            vars(self._stealing).pop("_combined_occupancy", None)


def may_run_anywhere(ts: TaskState) -> None:
    """Let a task run on any worker if all workers that it is restricted to are absent."""
    ts.loose_restrictions = True


def fail_task(scheduler: Scheduler, ts: TaskState, error: Exception, stimulus_id: str) -> None:
    """Fail a task that has no result yet. Its clients and the tasks that need it get the error.

    Dask has no transition from `waiting`, where a task is whose inputs got lost with its worker.
    Therefore the task is released first. It does not begin again, because it has an error.
    """
    ts.exception, ts.exception_text, ts.exception_blame = dumps(error), repr(error), ts
    recommended = scheduler.transition(ts.key, "released", stimulus_id=stimulus_id)
    # As for any failed task. Otherwise Dask would release it once the tasks that need it fail, and
    # then they would begin again.
    ts.waiters = None
    recommended[ts.key] = "erred"
    scheduler.transitions(recommended, stimulus_id=stimulus_id)


def expected_duration_s(scheduler: Scheduler, ts: TaskState) -> float:
    """Return how long the scheduler expects a task to take."""
    return scheduler._get_prefix_duration(ts.prefix)
