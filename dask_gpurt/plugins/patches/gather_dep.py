"""Values that a peer sent and that there was no memory for when they were put together.

Stock takes that for an error of the values and keeps it to itself: whoever waits for what needs
them waits for ever (dask/distributed#6705). So does the peer, for word that they arrived, on a
connection that is given to the next message. Memory comes and goes with tasks, most of all that of
a GPU; so here the values are asked for again when a task has ended. Where none will, the tasks that
need them fail, and say why.

| what | why | taken back by |
|---|---|---|
| `Worker.gather_dep` | no memory for a message is the same as a busy peer: ask again | `remove` |
| `Worker.rpc.reuse` | the peer still waits on a connection whose message was not taken; it is to
hear so | `remove` |
| `GatherDepFailureEvent`, `GatherDepBusyEvent`, `FreeKeysEvent`, `WorkerState.executing`,
`TaskState.run_id` | what became of a message, whether anything may end, and whose error it is in
the end | |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes
from distributed.core import error_message
from distributed.metrics import time
from distributed.protocol.pickle import loads
from distributed.worker_state_machine import (
    FreeKeysEvent,
    GatherDepBusyEvent,
    GatherDepFailureEvent,
)

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.memory")

#: With no task running or ending for so long, nobody will make room any more.
PATIENCE_S = 10.0


class Gathering:
    """Has one worker ask again for what it had no memory for, until `remove`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._n_ended = 0
        self._ended = asyncio.Event()
        self._is_short = False
        stock_gather_dep, stock_reuse = worker.gather_dep, worker.rpc.reuse

        async def gather_dep(
            worker: str, to_gather: Collection[Any], total_nbytes: int, *, stimulus_id: str
        ) -> Any:
            n_ended = self._n_ended
            event = await stock_gather_dep(
                worker, to_gather, total_nbytes=total_nbytes, stimulus_id=stimulus_id
            )
            error = _memory_error(event)
            if error is None:
                self._is_short = False
                return event
            self._warn_once(worker, to_gather, total_nbytes, error)
            if n_ended == self._n_ended:
                await self._wait_for_room(to_gather, total_nbytes, error)
            return GatherDepBusyEvent(
                worker=worker, total_nbytes=total_nbytes, stimulus_id=f"gpurt-no-room-{time()}"
            )

        def reuse(addr: str, comm: Any) -> None:
            # Called while an error is on its way up, which says nothing about the connection.
            if isinstance(sys.exception(), MemoryError):
                comm.abort()
            stock_reuse(addr, comm)

        worker.gather_dep = gather_dep  # type: ignore[method-assign]
        worker.rpc.reuse = reuse  # type: ignore[method-assign]

    def task_ended(self) -> None:
        """A task of this worker ended, or a value left it: there may be room now."""
        self._n_ended += 1
        self._ended.set()

    def remove(self) -> None:
        """Give the stock methods back. Whoever waits goes on."""
        vars(self._worker).pop("gather_dep", None)
        vars(self._worker.rpc).pop("reuse", None)
        self.task_ended()

    def _warn_once(self, peer: str, keys: Collection[Any], nbytes: int, error: MemoryError) -> None:
        if not self._is_short:
            self._is_short = True
            logger.warning(
                "no memory for %d values of %s from %s; they are asked for again: %s",
                len(keys),
                format_bytes(nbytes),
                peer,
                error,
            )

    async def _wait_for_room(self, keys: Collection[Any], nbytes: int, error: MemoryError) -> None:
        self._ended.clear()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._ended.wait()
                    return
            # What has left its thread may be waiting for these very values.
            if not self._worker.state.executing:
                return self._fail_users(keys, nbytes, error)

    def _fail_users(self, keys: Collection[Any], nbytes: int, error: MemoryError) -> None:
        tasks = self._worker.state.tasks
        users = {
            user
            for key in keys
            if key in tasks
            for user in tasks[key].dependents
            if user.state == "waiting"
        }
        try:
            raise MemoryError(
                f"worker {self._worker.address} has no memory for {len(keys)} inputs of "
                f"{format_bytes(nbytes)}, with no task running that could leave it some. Smaller "
                "partitions, fewer threads or fewer workers to a device need less at a time"
            ) from error
        except MemoryError as explained:
            told = error_message(explained)
        stimulus_id = f"gpurt-no-room-{time()}"
        for user in users:
            self._worker.batched_send(
                {
                    **told,
                    "op": "task-erred",
                    "key": user.key,
                    "run_id": user.run_id,
                    "thread": None,
                    "startstops": [],
                    "stimulus_id": stimulus_id,
                }
            )
        # The scheduler takes it that a task that failed here is done with here.
        failed = [user.key for user in users]
        self._worker.handle_stimulus(FreeKeysEvent(keys=failed, stimulus_id=stimulus_id))


def _memory_error(event: Any) -> MemoryError | None:
    """What a message failed with, if that is a want of memory."""
    if not isinstance(event, GatherDepFailureEvent):
        return None
    error = loads(event.exception.data)
    return error if isinstance(error, MemoryError) else None
