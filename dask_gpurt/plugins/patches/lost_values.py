"""Values that nothing can compute again, on the scheduler; the rest is in `plugins.patches.p2p`.

A worker tells the scheduler which values it could not read back. A value with a recipe is computed
again. A scattered value has none. Stock releases it all the same if a worker says that it is gone,
and then tries to compute it: an assertion fails, the worker is removed, and its queue breaks. If a
worker dies, stock forgets scattered values and cancels what needs them. The same is done here.

A client that asks for such a value later is told so, too. Stock lets it wait for ever, as when the
future comes from a `Variable`, a `Queue` or a published dataset.

Contract tests in `tests/plugins/patches/test_lost_values.py` fail when distributed moves any of it.

| what | why | taken back by |
|---|---|---|
| stream handler `release-worker-data`, `TaskState.run_spec`, `.who_has`, `.dependencies` | the last
copy of a value is gone, and nothing can compute it again | `LostValues.remove` |
| `Scheduler._transitions`, `.send_all`, `.remove_replica`, message `cancelled-keys` | the value and
what needs it are forgotten, and clients are told why | |
| stream handlers `client-desires-keys`, `report-key`, `variable-future-received-confirm`,
`queue-future-release` and `Scheduler.report` | clients that ask for a lost value later are told so
| `LostValues.remove` |
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt.memory")

#: Lost values that are remembered, for those who ask for them later.
MAX_REMEMBERED = 10_000
#: What a client's `FutureCancelledError` gives as the reason.
REASON = "lost value"


class LostValues:
    """Has one scheduler forget what cannot be computed again, until `remove`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: What to tell clients, by key; oldest first.
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

    def remove(self) -> None:
        """Give the stock handlers back."""
        handlers = self._scheduler.stream_handlers
        for name, ours in self._ours.items():
            if handlers.get(name) is ours:
                handlers[name] = self._stock[name]

    def _release(self, key: Any, worker: str, stimulus_id: str, **kwargs: Any) -> None:
        """Stream handler: a worker has a value no more."""
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
        said = (
            f"Worker {holder.address} has lost the last copy of {task.key!r}, and nothing can"
            f" compute it again: {why}. The log of that worker says how it was lost. Make the"
            " value anew, and then submit again what needs it."
        )
        logger.error("%s", said)
        scheduler.remove_replica(task, holder)
        # Stock forgets what has no recipe, or whose recipe has lost what it needs.
        task.has_lost_dependencies = task.run_spec is not None
        client_msgs: dict[Any, list[Any]] = {}
        worker_msgs: dict[Any, list[Any]] = {}
        scheduler._transitions({task.key: "forgotten"}, client_msgs, worker_msgs, stimulus_id)
        self._remember(task.key, said)
        for messages in client_msgs.values():
            for message in messages:
                if message["op"] == "cancelled-keys":
                    message.update(reason=REASON, msg=said)
                    for key in message["keys"]:
                        self._remember(key, said)
        scheduler.send_all(client_msgs, worker_msgs)

    def _remember(self, key: Any, said: str) -> None:
        self._lost[key] = said
        self._lost.move_to_end(key)
        while len(self._lost) > MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def _desire(self, keys: Collection[Any], client: str, **kwargs: Any) -> None:
        """Stream handler: a client has futures of these keys."""
        lost = [key for key in keys if self._is_lost(key)]
        rest = [key for key in keys if key not in lost] if lost else keys
        self._stock["client-desires-keys"](keys=rest, client=client, **kwargs)
        for key in lost:
            self._tell(key, client)

    def _report(self, key: Any = None, client: str | None = None, **kwargs: Any) -> None:
        """Stream handler: a client asks how it is with a key."""
        if client is not None and self._is_lost(key):
            self._tell(key, client)
        else:
            self._stock["report-key"](key=key, client=client, **kwargs)

    async def _got_from_variable(self, key: Any, client: str, **kwargs: Any) -> None:
        """Stream handler: a client has got a future out of a `Variable`."""
        if self._is_lost(key):
            self._tell(key, client)
        await self._stock["variable-future-received-confirm"](key=key, client=client, **kwargs)

    def _got_from_queue(self, key: Any, client: str, **kwargs: Any) -> None:
        """Stream handler: a client has got a future out of a `Queue`."""
        if self._is_lost(key):
            self._tell(key, client)
        self._stock["queue-future-release"](key=key, client=client, **kwargs)

    def _is_lost(self, key: Any) -> bool:
        if key not in self._lost:
            return False
        if key in self._scheduler.tasks:
            del self._lost[key]  # there is one again
            return False
        return True

    def _tell(self, key: Any, client: str) -> None:
        message = {"op": "cancelled-keys", "keys": [key], "reason": REASON, "msg": self._lost[key]}
        self._scheduler.report(message, client=client)


def why_not_again(task: Any) -> str | None:
    """Why the scheduler cannot have a value computed again; None if it can."""
    if task.actor:
        return None  # stock has rules of its own for these
    if task.run_spec is None:
        return "no task made it, as of a value that was scattered"
    failed = [dependency.key for dependency in task.dependencies if dependency.state == "erred"]
    if failed:
        return f"its input {failed[0]!r} has failed since"
    return None
