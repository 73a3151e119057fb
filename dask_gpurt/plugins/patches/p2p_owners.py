"""Selection of workers for output partitions, and restriction of output tasks to them.

Stock Dask assigns outputs to every worker that the restrictions of a barrier name, present or not.
The barrier of such a shuffle, and the tasks behind it, then wait for an absent worker. Stock Dask
also adds the owner of an output to the hosts that its task is restricted to. The task may then run
on any worker of those hosts, and asks for its owner again and again. Here:

- Only present workers own outputs, as far as the restrictions on addresses, hosts and resources
  allow. If they allow no present worker, any worker may own outputs: a loose restriction permits
  that, and under a strict one the barrier waits anyway.
- A task's restriction to hosts is suspended while the task is restricted to the owner of its
  output.

| what | why | taken back by |
|---|---|---|
| `ShuffleSchedulerPlugin._calculate_worker_for` | assigns outputs to workers that a barrier names
| `OutputOwners.uninstall` |
| `ShuffleSchedulerPlugin._set_restriction`, `._unset_restriction` | restrict a task to an owner,
and undo that | `OutputOwners.uninstall` |
| `Scheduler.host_info`, `.resources`, `.coerce_hostname`, `TaskState.host_restrictions` | the
meaning of a restriction | |

Contract tests in `tests/plugins/patches/test_p2p_owners.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.shuffle._core import barrier_key

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState

#: Annotation with a task's suspended restriction to hosts, like stock's one for addresses.
_HOSTS = "gpurt_original_host_restrictions"


class OutputOwners:
    """The patch that assigns the outputs of a scheduler's shuffles as above, until `uninstall`."""

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
            # Safe: stock reads this synchronously, and no other code runs meanwhile.
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
        # Patch the instance, which another patch may have changed already.
        self._before = {name: vars(plugin).get(name) for name in self._ours}
        for name, ours in self._ours.items():
            setattr(plugin, name, ours)

    def uninstall(self) -> None:
        """Restore the stock methods."""
        for name, ours in self._ours.items():
            if vars(self._plugin).get(name) is not ours:
                continue
            if self._before[name] is None:
                delattr(self._plugin, name)
            else:
                setattr(self._plugin, name, self._before[name])


def allowed(scheduler: Scheduler, task: TaskState) -> set[str] | None:
    """Return the addresses of the present workers that a task's restrictions allow.

    Return None if there are no restrictions, or no such worker. Paused workers count, because they
    will resume.
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
