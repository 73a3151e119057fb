"""Messages of ours between workers and the scheduler, over Dask's own connections.

| what | why | taken back by |
|---|---|---|
| `Scheduler.stream_handlers` | the scheduler hears a message of ours | `WorkerMessages.close` |
| handler `plugin-remove` of workers, `Scheduler.worker_plugins` | stock's
`unregister_worker_plugin` raises if one worker dies, and no longer waits for the others | |

Contract tests are in `tests/plugins/patches/test_worker_messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Scheduler


class WorkerMessages:
    """Hands messages of one name to a function, until `close`.

    Parameters
    ----------
    op
        The name of the message.
    handler
        Is called with the fields of each message and the address `worker`.
    """

    def __init__(self, scheduler: Scheduler, op: str, handler: Callable[..., Any]) -> None:
        self._scheduler, self._op = scheduler, op
        scheduler.stream_handlers[op] = handler

    def close(self) -> None:
        """Ignore all later messages.

        A message may be under way. Without a handler, it would close the worker's connection.
        """
        self._scheduler.stream_handlers[self._op] = _ignored


def _ignored(**_: Any) -> None:
    pass


async def remove_worker_plugin(scheduler: Scheduler, name: str) -> None:
    """Remove a plugin from all workers, and return when each has answered or has left."""
    scheduler.worker_plugins.pop(name, None)
    await scheduler.broadcast(msg={"op": "plugin-remove", "name": name}, on_error="ignore")
