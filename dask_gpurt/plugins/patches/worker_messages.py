"""Messages of ours from workers to the scheduler, over the stream that they have anyway.

| what | why | taken back by |
|---|---|---|
| `Scheduler.stream_handlers` | the scheduler hears a message of ours | `WorkerMessages.close` |

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
