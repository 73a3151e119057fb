"""One rank of a group on its worker: its operations, its peers, and the failure that ends it.

An operation has a number in its group, the *epoch*, which all ranks count alike. A message of an
earlier one is late and refused. A message of a later one waits until this rank gets there. A peer
that sends to this rank in each operation is at most `AHEAD` operations further, because it waits
for the answers. If others relay its messages, each of them may add as much.

The first failure ends the group. The scheduler tells it to all ranks, so they raise the same error.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dask_gpurt.errors import CollectiveError, ProtocolError, RankLostError
from dask_gpurt.plugins.collectives.groups.group_messages import GroupFailure, SliceHeader
from dask_gpurt.plugins.collectives.groups.operation_run import OperationPlan, OperationRun
from dask_gpurt.plugins.collectives.groups.task_thread import TaskThread
from dask_gpurt.plugins.patches.connections import drop_message
from dask_gpurt.plugins.tracing.ledger_hook import entered, message_numbers
from dask_gpurt.tracing.lane_names import COLLECTIVE

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.devices.host_memory.pool import HostPool
    from dask_gpurt.plugins.collectives.groups.group_messages import OperationCall
    from dask_gpurt.plugins.shuffle.peer_links import Compose, Links
    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

logger = logging.getLogger("dask_gpurt")

#: Operations by which a rank may be further than one that it sends to.
AHEAD = 2
#: Messages of one peer that may wait for this rank.
MOST_WAITING = 2048
#: Attempts to reach a peer. Unless the worker is gone, a new connection helps.
N_TRIES = 2
#: Answer to a message of an operation that this rank has done.
LATE = "late"
#: Answer to a message for a rank that has left its group.
OVER = "over"


class GroupMember:
    """One rank. On the event loop.

    Parameters
    ----------
    name
        Identifies the group on all of its workers.
    """

    def __init__(self, worker: Worker, runtime: WorkerRuntime, name: str, rank: int) -> None:
        self._worker = worker
        self.name, self.rank = name, rank
        self.links: Links = runtime.links
        self.pool: HostPool = runtime.pool
        self.memory_nbytes = runtime.memory_nbytes
        #: Addresses of all ranks, once all have begun.
        self.workers: Sequence[str] = ()
        self.timeout_s = 0.0
        self.failure: GroupFailure | None = None
        self._epoch = -1
        self._current: OperationRun | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_over = False
        self._change = asyncio.Event()
        self._n_waiting: Counter[int] = Counter()
        #: Small messages without an answer yet, by operation.
        self._behind: dict[int, set[asyncio.Task[None]]] = {}
        self._telling: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ changes

    def changed(self) -> None:
        """Let those that wait look again."""
        self._change.set()
        self._change = asyncio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state; raise `CollectiveError` if the group ends before."""
        while not is_so():
            if self._is_over or self.failure is not None:
                raise self.over()
            await self._change.wait()

    def over(self) -> CollectiveError:
        """Return the error for a peer whose message comes to a group that has ended here."""
        if self.failure is not None:
            return self.failure.error()
        return CollectiveError(f"rank {self.rank} has ended its step")

    def fail(self, error: BaseException) -> None:
        """End the group with an error of this rank, unless another error came first."""
        if self._telling is None and self.failure is None and not self._is_over:
            self._telling = asyncio.create_task(self._tell(GroupFailure.of(error)))

    async def _tell(self, failure: GroupFailure) -> None:
        """Have the scheduler decide on one failure for all ranks, and end with that."""
        try:
            answer = await self._worker.scheduler.gpurt_gang_failed(
                name=self.name, rank=self.rank, failure=failure.plain()
            )
            failure = GroupFailure.checked(answer)
        except Exception as error:
            logger.warning("the scheduler was not told of a failure: %s", error)
        self.end_with(failure)

    def end_with(self, failure: GroupFailure) -> None:
        """End the group, unless it has ended."""
        if self.failure is None and not self._is_over:
            self.failure = failure
            if self._current is not None:
                self._current.fail(failure.error())
            self._drop_messages()
            self.changed()

    def _drop_messages(self) -> None:
        for task in [task for tasks in self._behind.values() for task in tasks]:
            task.cancel()

    async def leave(self, failure: GroupFailure | None) -> None:
        """End this rank's part: its step has returned, or raised.

        `failure` is set afterwards if the group has failed meanwhile: a peer may not have what this
        rank sent last.
        """
        if failure is not None:
            self.end_with(failure)
        await self._heard(self._epoch)
        if self._telling is not None:
            await asyncio.wait({self._telling})
        self._is_over = True
        self._drop_messages()
        self.changed()

    # ------------------------------------------------------------------ operations

    def begin(
        self,
        call: str,
        thread: TaskThread,
        plan: OperationPlan | None,
        prepare: Callable[[OperationCall], OperationPlan] | None = None,
    ) -> None:
        """Begin an operation; `thread` is let go when it ends."""
        if self.failure is not None or self._is_over:
            thread.end(self.over())
            return
        self._epoch += 1
        run = OperationRun(self, self._epoch, call, thread, plan, prepare)
        self._current = run
        self.changed()
        self._running = asyncio.create_task(self._to_its_end(run, thread))

    async def _to_its_end(self, run: OperationRun, thread: TaskThread) -> None:
        error: BaseException | None = None
        try:
            await run.run()
            # A peer may be two operations ahead, and no more.
            await self._heard(run.epoch - AHEAD + 1)
            error = run.error
        except CollectiveError as raised:
            error = raised
        except asyncio.CancelledError:
            error = CollectiveError("the worker closes")
        except Exception as raised:
            # For example, there is no memory: the others get this error, too.
            error = raised
            self.fail(CollectiveError(f"rank {self.rank} failed: {raised!r}"))
        finally:
            self._current = None
            # Without its traceback, the error does not keep the memory of the operation.
            thread.end(error.with_traceback(None) if error is not None else None)

    # ------------------------------------------------------------------ messages

    def send_behind(self, epoch: int, peer: int, compose: Compose) -> None:
        """Send a small message; the operation need not wait for its answer."""
        task = asyncio.create_task(self.deliver(peer, compose))
        self._behind.setdefault(epoch, set()).add(task)
        task.add_done_callback(partial(self._on_sent, epoch))

    async def _heard(self, last: int) -> None:
        """Wait for answers to small messages up to an operation; fail if none comes in time."""
        tasks = {task for epoch, some in self._behind.items() if epoch <= last for task in some}
        while tasks:
            answered, tasks = await asyncio.wait(
                tasks, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not answered:
                if self.failure is not None:
                    # It came before these messages, so nothing else ends them.
                    for task in tasks:
                        task.cancel()
                # The failure ends these tasks.
                why = f"rank {self.rank} made no progress for {self.timeout_s:g} s"
                self.fail(CollectiveError(f"{why}: peers have not taken its messages"))

    def _on_sent(self, epoch: int, task: asyncio.Task[None]) -> None:
        tasks = self._behind[epoch]
        tasks.discard(task)
        if not tasks:
            del self._behind[epoch]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def deliver(self, peer: int, compose: Compose) -> None:
        """Send a message and wait for the peer's answer.

        Raises
        ------
        RankLostError
            The peer cannot be reached.
        CollectiveError
            It refuses the message.
        """
        address = self.workers[peer]
        is_again = False
        # A receiver that has taken a message in may get it again under another number.
        number = 0

        async def call(data: dict[str, Any]) -> dict[str, Any]:
            here = {"name": self.name, "sender": self._worker.address, "message": number}
            try:
                answer = await self.links.connections.call(
                    address, "gpurt_collective", **here, **data
                )
            except OSError as unsent:
                drop_message(unsent)
                raise
            if answer["status"] == OVER or (answer["status"] == LATE and not is_again):
                raise GroupFailure.checked(answer["failure"]).error()
            return answer

        for _ in range(N_TRIES):
            number = next(message_numbers)
            try:
                await entered(
                    self.links.ledger,
                    lambda composing: self.links.deliver(
                        address, self.links.transport, composing, call
                    ),
                    compose,
                    address,
                    "group",
                    COLLECTIVE,
                    message=number,
                )
                return
            except OSError as error:
                failed, is_again = error, True
            except CollectiveError:
                raise
            except Exception as error:
                raise CollectiveError(f"rank {peer} refused a message: {error}") from None
        raise RankLostError(peer, address) from failed

    async def take(self, sender: str, header: SliceHeader, payload: Any) -> dict[str, Any]:
        """Take in a message of a peer; return the answer.

        Raises
        ------
        ProtocolError
            It is not a message of this group, or not one that is due.
        DamagedError, TransportError
            As from `Links.fetch`.
        """
        peer = header.rank
        if self._n_waiting[peer] >= MOST_WAITING:
            raise ProtocolError(f"rank {peer} sends too many messages at once")
        self._n_waiting[peer] += 1
        try:
            await self.until(lambda: bool(self.workers))
            if peer >= len(self.workers) or self.workers[peer] != sender or peer == self.rank:
                raise ProtocolError(f"{sender[:100]} is not rank {peer} of this group")
            # All other ranks may be a chain that relays messages from the peer to this rank.
            if header.epoch > self._epoch + AHEAD * (len(self.workers) - 1):
                raise ProtocolError(f"operation {header.epoch} is not due: {self._epoch} runs")
            await self.until(lambda: self._epoch >= header.epoch)
            run = self._current
            if run is None or run.epoch != header.epoch:
                why = f"rank {self.rank} has done operation {header.epoch} of its group"
                return {"status": LATE, "failure": GroupFailure("failed", why).plain()}
            await run.take(header, payload)
        except CollectiveError as error:
            return {"status": OVER, "failure": GroupFailure.of(error).plain()}
        finally:
            self._n_waiting[peer] -= 1
        return {"status": "OK"}
