"""Which workers may own output partitions, and how their tasks are kept there.

Stock gives outputs to every worker that the restrictions of a barrier name, whether it is there or
not. The barrier of such a shuffle waits for a worker that is absent, and so do the tasks behind it.
Stock also adds the owner of an output to the hosts that its task is restricted to. The task then
may run on any worker of those hosts, and asks for its owner again and again. Here:

- Outputs go to workers that are there and that the restrictions on addresses, hosts and resources
  allow. Where there is none, they go to any worker: a loose restriction allows that, and with a
  strict one the barrier waits anyway.
- The restriction to hosts rests for as long as a task is restricted to the owner of its output.

Contract tests in `tests/plugins/patches/test_p2p_owners.py` fail when distributed moves any of it.

| what | why | taken back by |
|---|---|---|
| `ShuffleSchedulerPlugin._calculate_worker_for` | reads the restrictions of the barrier, see above
| `OutputOwners.remove` |
| `ShuffleSchedulerPlugin._set_restriction`, `._unset_restriction` | send a task to an owner, and
take that back | `OutputOwners.remove` |
| `Scheduler.host_info`, `.resources`, `.coerce_hostname`, `TaskState.host_restrictions` | what a
restriction means | |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.shuffle._core import barrier_key

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

#: Annotation of a task whose restriction to hosts rests; stock keeps that to addresses likewise.
_HOSTS = "gpurt_original_host_restrictions"


class OutputOwners:
    """Has the shuffles of one scheduler give out their outputs as above, until `remove`."""

    def __init__(self, scheduler: Scheduler) -> None:
        plugin: Any = scheduler.plugins["shuffle"]
        self._plugin = plugin
        owners_of, set_, unset = (
            plugin._calculate_worker_for,
            plugin._set_restriction,
            plugin._unset_restriction,
        )

        def calculate_worker_for(spec: Any) -> dict[Any, str]:
            barrier = scheduler.tasks[barrier_key(spec.id)]
            stated = barrier.worker_restrictions
            # Nothing else runs meanwhile: stock reads this, and is not interrupted.
            barrier.worker_restrictions = allowed(scheduler, barrier)
            try:
                found: dict[Any, str] = owners_of(spec)
                return found
            finally:
                barrier.worker_restrictions = stated

        def set_restriction(ts: TaskState, worker: str) -> None:
            set_(ts, worker)
            if ts.host_restrictions and ts.annotations is not None:
                ts.annotations[_HOSTS] = ts.host_restrictions
                ts.host_restrictions = None

        def unset_restriction(ts: TaskState) -> None:
            unset(ts)
            if ts.annotations is not None and _HOSTS in ts.annotations:
                ts.host_restrictions = ts.annotations.pop(_HOSTS)

        self._ours: dict[str, Callable[..., Any]] = {
            "_calculate_worker_for": calculate_worker_for,
            "_set_restriction": set_restriction,
            "_unset_restriction": unset_restriction,
        }
        # On the instance, where something may be already.
        self._before = {name: vars(plugin).get(name) for name in self._ours}
        for name, ours in self._ours.items():
            setattr(plugin, name, ours)

    def remove(self) -> None:
        """Give the stock methods back."""
        for name, ours in self._ours.items():
            if vars(self._plugin).get(name) is not ours:
                continue
            if self._before[name] is None:
                delattr(self._plugin, name)
            else:
                setattr(self._plugin, name, self._before[name])


def allowed(scheduler: Scheduler, task: TaskState) -> set[str] | None:
    """Addresses of the workers that a task's restrictions allow, of those that are there.

    None where there are no restrictions, or no such worker. Workers that are paused count: they
    will go on.
    """
    found: set[str] | None = None
    if task.worker_restrictions or task.host_restrictions:
        found = set(task.worker_restrictions or ()) & scheduler.workers.keys()
        for name in task.host_restrictions or ():
            host = scheduler.host_info.get(scheduler.coerce_hostname(name))
            found |= set(host["addresses"]) if host is not None else set()
    for resource, needed in (task.resource_restrictions or {}).items():
        supplies = scheduler.resources.get(resource, {})
        able = {address for address, supplied in supplies.items() if supplied >= needed}
        found = able if found is None else found & able
    return found or None
