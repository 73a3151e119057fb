"""Lost values that no task can compute again: the scheduler cancels the tasks that need them.

A worker tells the scheduler which values it could not read back. The scheduler computes a value
again if a task made it; for a scattered value, there is no such task. Stock Dask releases the value
all the same and tries to compute it: an assertion fails, the worker is removed, and its queue
breaks. If a worker dies, however, stock Dask forgets scattered values and cancels the tasks that
need them. This patch does the same for lost values.

A client that asks for such a value later gets an error too. Stock Dask lets it wait for ever if the
future comes from a `Variable`, a `Queue` or a published dataset.

| what | why | taken back by |
|---|---|---|
| stream handler `release-worker-data`, `TaskState.run_spec`, `.who_has`, `.dependencies` | shows
that the last copy of a value is gone, and that no task can compute it again |
`LostValues.uninstall` |
| `Scheduler._transitions`, `.send_all`, `.remove_replica`, message `cancelled-keys` | forget the
value and the tasks that need it, and tell clients why | |
| stream handlers `client-desires-keys`, `report-key`, `variable-future-received-confirm`,
`queue-future-release` and `Scheduler.report` | tell clients that ask for a lost value later |
`LostValues.uninstall` |

Contract tests in `tests/plugins/patches/test_lost_values.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt.memory")

#: Most lost values remembered for clients that ask for them later.
MAX_REMEMBERED = 10_000
#: The reason in a client's `FutureCancelledError`.
REASON = "lost value"


class LostValues:
    """The patch that makes one scheduler forget such values, until `uninstall`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Explanations for clients, by key; oldest first.
        self._lost: OrderedDict[Any, str] = OrderedDict()
        self._ours: dict[str, Callable[..., Any]] = {
            "release-worker-data": self._release,
            "client-desires-keys": self._desire,
            "report-key": self._report,
            "variable-future-received-confirm": self._got_from_variable,
            "queue-future-release": self._got_from_queue,
        }
        self._stock: dict[str, Callable[..., Any]] = {
            name: scheduler.stream_handlers[name] for name in self._ours
        }
        scheduler.stream_handlers.update(self._ours)

    def uninstall(self) -> None:
        """Restore the stock handlers."""
        handlers = self._scheduler.stream_handlers
        for name, ours in self._ours.items():
            if handlers.get(name) is ours:
                handlers[name] = self._stock[name]

    def _release(self, key: Any, worker: str, stimulus_id: str, **kwargs: Any) -> None:
        """Handle the message that a worker no longer has a value."""
        task, holder = self._scheduler.tasks.get(key), self._scheduler.workers.get(worker)
        if task is not None and task.state == "memory" and task.who_has == {holder}:
            why = why_not_again(task)
            if why is not None:
                self._forget(task, holder, why, stimulus_id)
                return
        self._stock["release-worker-data"](
            key=key, worker=worker, stimulus_id=stimulus_id, **kwargs
        )

    def _forget(self, task: Any, holder: Any, why: str, stimulus_id: str) -> None:
        scheduler = self._scheduler
        text = (
            f"Worker {holder.address} has lost the last copy of {task.key!r}, and nothing can"
            f" compute it again: {why}. The log of that worker says how it was lost. Create the"
            " value again, and then submit the tasks that need it."
        )
        logger.error("%s", text)
        scheduler.remove_replica(task, holder)
        # Stock forgets a task without a run spec, or with one whose dependencies are lost.
        task.has_lost_dependencies = task.run_spec is not None
        client_msgs: dict[Any, list[Any]] = {}
        worker_msgs: dict[Any, list[Any]] = {}
        scheduler._transitions({task.key: "forgotten"}, client_msgs, worker_msgs, stimulus_id)
        self._remember(task.key, text)
        for messages in client_msgs.values():
            for message in messages:
                if message["op"] == "cancelled-keys":
                    message.update(reason=REASON, msg=text)
                    for key in message["keys"]:
                        self._remember(key, text)
        scheduler.send_all(client_msgs, worker_msgs)

    def _remember(self, key: Any, text: str) -> None:
        self._lost[key] = text
        self._lost.move_to_end(key)
        while len(self._lost) > MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def _desire(self, keys: Collection[Any], client: str, **kwargs: Any) -> None:
        """Handle the message that a client has futures of these keys."""
        lost = [key for key in keys if self._is_lost(key)]
        rest = [key for key in keys if key not in lost] if lost else keys
        self._stock["client-desires-keys"](keys=rest, client=client, **kwargs)
        for key in lost:
            self._tell(key, client)

    def _report(self, key: Any = None, client: str | None = None, **kwargs: Any) -> None:
        """Handle a client's request for the state of a key."""
        if client is not None and self._is_lost(key):
            self._tell(key, client)
        else:
            self._stock["report-key"](key=key, client=client, **kwargs)

    async def _got_from_variable(self, key: Any, client: str, **kwargs: Any) -> None:
        """Handle the message that a client has got a future from a `Variable`."""
        if self._is_lost(key):
            self._tell(key, client)
        await self._stock["variable-future-received-confirm"](key=key, client=client, **kwargs)

    def _got_from_queue(self, key: Any, client: str, **kwargs: Any) -> None:
        """Handle the message that a client has got a future from a `Queue`."""
        if self._is_lost(key):
            self._tell(key, client)
        self._stock["queue-future-release"](key=key, client=client, **kwargs)

    def _is_lost(self, key: Any) -> bool:
        if key not in self._lost:
            return False
        if key in self._scheduler.tasks:
            del self._lost[key]  # a new task has this key
            return False
        return True

    def _tell(self, key: Any, client: str) -> None:
        message = {"op": "cancelled-keys", "keys": [key], "reason": REASON, "msg": self._lost[key]}
        self._scheduler.report(message, client=client)


def why_not_again(task: Any) -> str | None:
    """Return why the scheduler cannot have a value computed again; None if it can."""
    if task.actor:
        return None  # stock has its own rules for actors
    if task.run_spec is None:
        return "no task made it, so it was probably scattered"
    failed = [dependency.key for dependency in task.dependencies if dependency.state == "erred"]
    if failed:
        return f"its input {failed[0]!r} has failed since"
    return None
