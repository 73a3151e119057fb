"""The calls of one run to the scheduler: check the run, move a task, start over.

distributed's control plane answers them. `exchange_run` says when they are needed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NoReturn

from dask_gpurt.plugins.patches.p2p import Reschedule, clean_exception

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt.shuffle")


class RunControl:
    """Calls for the run `run_id` of the shuffle `shuffle_id`."""

    def __init__(self, worker: Worker, shuffle_id: Any, run_id: int) -> None:
        self._worker = worker
        self._shuffle_id = shuffle_id
        self._run_id = run_id
        #: Resolves to whether this run is over; None until a task asks for a new run.
        self._is_over: asyncio.Future[bool] | None = None

    async def is_stale(self) -> bool:
        """Return whether the scheduler has given up this run."""
        answer = await self._worker.scheduler.shuffle_get(
            id=self._shuffle_id, worker=self._worker.address
        )
        return bool(answer["status"] != "OK" or answer["run_spec"].run_id != self._run_id)

    async def end_inputs(self, *, consistent: bool) -> None:
        """Tell all workers that every input partition was added.

        Parameters
        ----------
        consistent
            False makes the scheduler start a new run instead.
        """
        await self._worker.scheduler.shuffle_barrier(
            id=self._shuffle_id, run_id=self._run_id, consistent=consistent
        )

    async def barrier(self, run_has_ended: asyncio.Event, *, consistent: bool) -> None:
        """End the inputs for the barrier task, unless the run ends meanwhile.

        Raises
        ------
        Reschedule
            The run has ended, or peers take part in a newer one.
        """
        call = self.end_inputs(consistent=consistent)
        answered, over = map(asyncio.ensure_future, (call, run_has_ended.wait()))
        # Read the error, so that asyncio does not log it when no caller waits any more.
        answered.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            # A scheduler that lost a worker may try to reach it for half a minute. By then this
            # task may be the barrier of the next run, and a late answer would end that run as well.
            await asyncio.wait({answered, over}, return_when=asyncio.FIRST_COMPLETED)
            if run_has_ended.is_set():
                raise Reschedule()
            try:
                await answered
            except Exception:
                # Peers that already take part in a newer run refuse messages of this one.
                if await self.is_stale():
                    raise Reschedule() from None
                raise
        finally:
            answered.cancel()
            over.cancel()

    async def move_task(self, key: Any, owner: str) -> NoReturn:
        """Let a task run again, on the worker that owns its output partition."""
        answer = await self._worker.scheduler.shuffle_restrict_task(
            id=self._shuffle_id, run_id=self._run_id, key=key, worker=owner
        )
        if answer["status"] == "error":
            _, error, traceback = clean_exception(**answer)
            assert error is not None
            raise error.with_traceback(traceback)
        raise Reschedule()

    async def start_over(self, error: Exception) -> NoReturn:
        """Ask for a new run of the whole shuffle: this one cannot return an output.

        A released output is wanted again if the worker that held a result of it died, or if a later
        graph reads the same shuffle.
        """
        # Tasks in several threads may fail at once. The scheduler logs an error for each repeated
        # request.
        if self._is_over is None:
            logger.warning("shuffle %s starts over: %s", self._shuffle_id, error)
            self._is_over = asyncio.ensure_future(self._end())
        if not await asyncio.shield(self._is_over):
            # The scheduler kept this run, so another attempt would fail too.
            raise error
        raise Reschedule()

    async def _end(self) -> bool:
        """Ask the scheduler to give up this run, and return whether it has."""
        if await self.is_stale():
            return True
        try:
            await self.end_inputs(consistent=False)
        except (KeyError, ValueError):
            # Another worker has asked meanwhile.
            return True
        return await self.is_stale()
