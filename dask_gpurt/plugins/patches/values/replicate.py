"""Replicas that a client asks for: broadcasts make them where possible, and they stay.

| what | why | taken back by |
|---|---|---|
| `Scheduler.replicate`, `.scatter`, and the handlers of these names | copies values to workers, for
`Client.replicate` and `scatter(broadcast=True)` | `ReplicateSwap.uninstall` |
| `Scheduler.add_replica`, `.update_data`, `.running`, `.workers_list` | tells the scheduler of
copies, and which workers get them | |
| extension `amm`: `.policies`, `.add_policy`; `ReduceReplicas.run` | removes replicas every two
seconds, also those that a client asked for (dask/dask#11148) | `KeptReplicas.uninstall` |
| `Worker.update_data`; `WorkerState.tasks`, `.in_flight_tasks` | gives a worker a replica, unless
it is fetching one | |
| `Scheduler.worker_send`, message `free-keys` of workers | has a worker's copy dropped if the key
is gone or used anew | `CopyReports.close` |
| `serialize`, `deserialize`, `Serialized`, `merge_and_deserialize` and `decompress` of
`distributed.protocol` | a value as frames of bytes, and back | |

Contract tests in `tests/plugins/patches/test_replicate.py` fail when distributed changes any of
these names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt
from distributed.active_memory_manager import ReduceReplicas
from distributed.metrics import time
from distributed.protocol import deserialize
from distributed.protocol import serialize as _serialize
from distributed.protocol.compression import decompress
from distributed.protocol.serialize import Serialized, merge_and_deserialize

from dask_gpurt.errors import ProtocolError
from dask_gpurt.plugins.patches.values.by_task import ByTask
from dask_gpurt.plugins.patches.values.value_bytes import whole_nbytes
from dask_gpurt.plugins.patches.worker_messages import WorkerMessages
from dask_gpurt.plugins.weak_handlers import weak_handler

if TYPE_CHECKING:
    from distributed import Scheduler, Worker
    from distributed.scheduler import TaskState, WorkerState

Buffer = npt.NDArray[np.uint8]
#: A worker's message to the scheduler: it has a copy.
_COPIED = "gpurt-copied"
#: A worker's question before it keeps a copy.
_IS_WANTED = "gpurt_copy_is_wanted"
#: Copies values to all of these workers, as far as it can; stock Dask makes the missing copies.
Broadcast = Callable[["TaskState", Collection["WorkerState"]], Awaitable[None]]
#: Copies a serialised value to workers; returns the addresses of those that have it, with its size.
Scatter = Callable[[Any, Serialized, Collection["WorkerState"]], Awaitable[dict[str, int]]]


class ReplicateSwap:
    """The patch that lets broadcasts make copies first, until `uninstall`.

    Parameters
    ----------
    broadcast
        Copies a value of a worker to others.
    scatter
        Copies a value of a client to workers.
    keep
        Called with tasks whose replicas a client wants.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        broadcast: Broadcast,
        scatter: Scatter,
        keep: Callable[[Iterable[TaskState]], None],
    ) -> None:
        self._scheduler = scheduler
        self._broadcast, self._scatter, self._keep = broadcast, scatter, keep
        self._stock_replicate, self._stock_scatter = scheduler.replicate, scheduler.scatter
        self._stock_handlers = {one: scheduler.handlers[one] for one in ("replicate", "scatter")}
        self._ours: dict[str, Callable[..., Any]]
        self._ours = {"replicate": self._replicated, "scatter": self._scattered}
        vars(scheduler).update(self._ours)
        scheduler.handlers.update(self._ours)

    # Dask inspects the names of a handler's parameters, so these have stock's.

    async def _replicated(
        self,
        keys: list[Any],
        n: int | None = None,
        workers: Iterable[Any] | None = None,
        branching_factor: int = 2,
        delete: bool = True,
        stimulus_id: str | None = None,
    ) -> dict[str, Any] | None:
        scheduler = self._scheduler
        targets = _running(scheduler, scheduler.workers_list(workers))
        tasks = [ts for key in keys if (ts := scheduler.tasks.get(key)) is not None]
        self._keep(tasks)
        if n is None or n >= len(targets):
            for ts in tasks:
                await self._broadcast(ts, targets)
        return await self._stock_replicate(keys, n, workers, branching_factor, delete, stimulus_id)

    async def _scattered(
        self,
        data: dict[Any, Any],
        workers: Iterable[Any] | None,
        client: str,
        broadcast: Any = False,
        timeout: float = 2,
    ) -> Any:
        scheduler = self._scheduler
        sent: dict[Any, dict[str, int]] = {}
        targets: set[WorkerState] = set()
        if broadcast is True:
            # Unlike `replicate`, this also takes names of workers, and addresses in part.
            if workers is not None:
                workers = [scheduler.coerce_address(one) for one in workers]
            targets = _running(scheduler, scheduler.workers if workers is None else workers)
            for key, value in data.items():
                if isinstance(value, Serialized) and (
                    made := await self._scatter(key, value, targets)
                ):
                    sent[key] = made
        # A worker may leave at any `await`. Stock Dask makes the copies of a value that has none.
        who_has = {}
        for key, made in [*sent.items()]:
            if holders := [address for address in made if address in scheduler.workers]:
                who_has[key] = holders
            else:
                del sent[key]
        if sent:
            scheduler.update_data(
                who_has=who_has,
                nbytes={key: max(made.values()) for key, made in sent.items()},
                client=client,
            )
        rest = {key: value for key, value in data.items() if key not in sent}
        if rest:
            await self._stock_scatter(rest, workers, client, broadcast, timeout)
        if sent:  # stock Dask makes the copies that are missing
            there = [ws.address for ws in targets if ws.address in scheduler.workers]
            await self._replicated(list(sent), None, there)
        return list(data)

    def uninstall(self) -> None:
        """Restore the stock methods and handlers."""
        for name, ours in self._ours.items():
            vars(self._scheduler).pop(name, None)
            if self._scheduler.handlers.get(name) == ours:
                self._scheduler.handlers[name] = self._stock_handlers[name]


def _running(scheduler: Scheduler, addresses: Iterable[str]) -> set[WorkerState]:
    """Return the running workers at these addresses.

    Raises
    ------
    KeyError
        No worker has this address. Stock Dask raises the same error.
    """
    return {scheduler.workers[address] for address in addresses} & scheduler.running


class _KeepWanted(ReduceReplicas):
    """Stock Dask's policy, without the tasks whose replicas a client wants."""

    def __init__(self, is_kept: Callable[[TaskState], bool]) -> None:
        self._is_kept = is_kept

    def run(self) -> Any:
        stock = super().run()
        answer = None
        while True:
            try:
                suggestion = stock.send(answer)
            except StopIteration:
                return
            answer = None
            if not self._is_kept(suggestion.ts):
                answer = yield suggestion


class KeptReplicas:
    """Replicas that stay as long as a client has a future of the value, until `uninstall`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._kept: ByTask[bool] = ByTask()
        self._manager: Any = scheduler.extensions.get("amm")
        policies = self._manager.policies if self._manager is not None else ()
        self._stock = [one for one in policies if type(one) is ReduceReplicas]
        self._ours = [_KeepWanted(self._is_kept) for _ in self._stock]
        self._replace(self._stock, self._ours)

    def keep(self, tasks: Iterable[TaskState]) -> None:
        """Keep the replicas of these tasks."""
        for ts in tasks:
            self._kept.set(ts, True)

    def _is_kept(self, ts: TaskState) -> bool:
        return bool(self._kept.get(ts) and ts.who_wants)

    def uninstall(self) -> None:
        """Restore the stock policy."""
        self._replace(self._ours, self._stock)

    def _replace(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        for one in old:
            self._manager.policies.discard(one)
        for one in new:
            self._manager.add_policy(one)


class TaskVersions:
    """Version numbers of tasks, from 1: a new task with an old key gets a new number."""

    def __init__(self) -> None:
        self._numbers: ByTask[int] = ByTask()
        self._next = count(1)

    def of(self, ts: TaskState) -> int:
        return self._numbers.get(ts) or self._numbers.set(ts, next(self._next))


class CopyReports:
    """Hears from workers that they have a copy, until `close`.

    Stock Dask's message for this, `add-keys`, says nothing about the version. A copy of an old
    value would count as one of the new value that has its key.
    """

    def __init__(self, scheduler: Scheduler, versions: TaskVersions) -> None:
        self._scheduler, self._versions = scheduler, versions
        self._messages = WorkerMessages(scheduler, _COPIED, self._copied)
        scheduler.handlers[_IS_WANTED] = weak_handler(self._is_wanted)

    async def _is_wanted(self, key: Any, version: int) -> bool:
        """Handler: return whether the value with a key is still the one of this version."""
        return self._is_current(self._scheduler.tasks.get(key), version)

    def _is_current(self, ts: TaskState | None, version: int) -> TypeGuard[TaskState]:
        return ts is not None and ts.state == "memory" and self._versions.of(ts) == version

    def _copied(self, key: Any, version: int, worker: str, stimulus_id: str) -> None:
        ws, ts = self._scheduler.workers.get(worker), self._scheduler.tasks.get(key)
        if ws is None:
            return
        if self._is_current(ts, version):
            self._scheduler.add_replica(ts, ws)
        elif ts is None or ws not in (ts.who_has or ()):
            message = {"op": "free-keys", "keys": [key], "stimulus_id": stimulus_id}
            self._scheduler.worker_send(worker, message)

    def close(self) -> None:
        """Take no more reports."""
        self._scheduler.handlers.pop(_IS_WANTED, None)
        self._messages.close()


async def take_replica(worker: Worker, key: Any, value: Any, version: int) -> int | None:
    """Give a worker a replica, tell the scheduler, and return its size.

    Returns None, and leaves the value, if the scheduler has forgotten it, or if the worker is
    fetching it. Otherwise the task could be forgotten before the fetch ends, which closes the
    worker.

    Parameters
    ----------
    version
        The scheduler's number for the task; 0 if the scheduler does not know the key yet. Then
        the caller tells it.
    """
    if version and not await getattr(worker.scheduler, _IS_WANTED)(key=key, version=version):
        return None
    task = worker.state.tasks.get(key)
    if task is not None and task in worker.state.in_flight_tasks:
        return None
    size = whole_nbytes(worker.update_data({key: value})["nbytes"][key])
    if version:
        stimulus_id = f"gpurt-copied-{time()}"
        told = {"op": _COPIED, "key": key, "version": version, "stimulus_id": stimulus_id}
        worker.batched_send(told)
    return size


def serialize(value: Any) -> tuple[Any, list[Buffer]]:
    """Return a value as a header for Dask's messages, and stretches of bytes."""
    header, frames = _serialize(value, on_error="raise")
    return header, stretches_of(frames)


def stretches_of(frames: Iterable[Any]) -> list[Buffer]:
    """Return the bytes of each frame of a serialised value, without a copy."""
    return [np.frombuffer(frame, dtype=np.uint8) for frame in frames]


class Received:
    """Memory for a value that arrives in stretches, and the value in it.

    Dask's messages divide large frames into parts. Here the parts of a frame are adjacent, so they
    become a frame again without a copy.

    Parameters
    ----------
    lengths
        Bytes of each stretch.
    empty
        Returns memory of the given number of bytes.
    """

    def __init__(self, header: Any, lengths: Sequence[int], empty: Callable[[int], Buffer]) -> None:
        n_parts = header.get("split-num-sub-frames") or [1] * len(lengths)
        if sum(n_parts) != len(lengths):
            raise ProtocolError(f"{len(lengths)} stretches instead of {sum(n_parts)}")
        self._header = header
        self._frames: list[Buffer] = []
        self.stretches: list[Buffer] = []
        left = iter(lengths)
        for n in n_parts:
            mine = list(islice(left, n))
            frame, start = empty(sum(mine)), 0
            self._frames.append(frame)
            for nbytes in mine:
                self.stretches.append(frame[start : start + nbytes])
                start += nbytes

    def value(self) -> Any:
        """Return the value once all stretches are filled. It keeps the memory."""
        header = self._header
        if any(header.get("compression") or ()):
            whole = decompress(header, [one.data for one in self.stretches])
            return merge_and_deserialize(header, whole)
        return deserialize(header, [one.data for one in self._frames])
