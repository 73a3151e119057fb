"""The client's side of groups: it runs a function on each worker, on all of them or on none.

The scheduler says when the workers are free (`gangs`). Then each rank is one task (`rank.run_rank`)
that may run on its worker only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import dask
from dask.core import flatten
from dask.utils import parse_timedelta
from distributed import Future, futures_of, get_worker, wait
from distributed.threadpoolexecutor import thread_state

from dask_gpurt.errors import ActivationError, GangError
from dask_gpurt.plugins import activation
from dask_gpurt.plugins.collectives.groups.gangs import rank_key
from dask_gpurt.plugins.collectives.groups.rank import run_rank
from dask_gpurt.plugins.collectives.groups.torch_start import run_with_torch

if TYPE_CHECKING:
    from distributed import Client

#: Ranks run before other tasks of their workers: other ranks of the gang wait for them.
PRIORITY = 1000


class Communicator:
    """Runs functions on several workers at the same time, which exchange arrays while they run.

    Leave the `with` block to wait for its runs. An error in the block ends them.

    Parameters
    ----------
    client : distributed.Client
        A client of a cluster with the runtime on.
    workers : list of str, or str, optional
        Addresses or names of workers, in the order of ranks. Default: all workers, by host.
    timeout : str or float
        How long a rank waits for another one without any progress, and for all to begin.

    Examples
    --------
    >>> def step(comm, blocks):
    ...     return comm.allreduce(sum(block.sum() for block in blocks))
    >>> with Communicator(client) as comm:
    ...     futures = comm.run(step, dask_array)
    >>> client.gather(futures)  # the same sum, from each worker
    """

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | str | None = None,
        timeout: str | float = "5 minutes",
    ) -> None:
        self._client = client
        self._timeout_s = float(parse_timedelta(timeout))
        if self._timeout_s <= 0:
            raise ValueError(f"timeout is {timeout!r}; it must be a positive time")
        if isinstance(workers, str):
            workers = [workers]
        self.workers = None if workers is None else list(workers)
        self._has_all = workers is None
        #: Names of the gangs that may still run.
        self._names: list[str] = []
        #: They keep the futures of a `with` block: Dask cancels tasks without futures.
        self._keeping: set[asyncio.Task[Any]] = set()
        self._is_entered = False

    def __repr__(self) -> str:
        ranks = "all workers" if self.workers is None else f"{len(self.workers)} workers"
        return f"<Communicator: {ranks}>"

    def run(self, step: Callable[..., Any], blocks: Any = None, *state: Any) -> Any:
        """Call a function once on each worker, at the same time.

        It waits for other gangs on these workers, and returns when the tasks are submitted.

        Parameters
        ----------
        step
            Called as `step(comm, blocks, *state)`, with a `Rank` that exchanges arrays with the
            other ranks, and the list of blocks on its worker.
        blocks
            A Dask collection, or a list of futures. It is computed first, if it is not persisted. A
            tuple of collections gives tuples: blocks of the same position, on the worker of the
            first one. Blocks on other workers are moved.
        state
            Further arguments, the same for all ranks. Futures become their values.

        Returns
        -------
        list of Future
            The return value of each rank, in the order of ranks. With an asynchronous client: an
            awaitable of the list.

        Raises
        ------
        GangError
            The ranks cannot run at the same time, for example because a worker has no free thread
            for its rank. Nothing has run.
        ActivationError
            The runtime is off on that cluster.
        """
        return self._client.sync(self._run, step, blocks, state, *_this_task())

    def run_torch(
        self, function: Callable[..., Any], blocks: Any = None, *state: Any, backend: str = "auto"
    ) -> Any:
        """Call a function as `run` does, while torch.distributed runs on these ranks.

        Workers must be processes of their own, with torch. The variables of `Rank.torch_env` are
        set while the function runs.

        Parameters
        ----------
        function, blocks, state
            As for `run`.
        backend
            `gloo`, `nccl`, or `auto`: NCCL if each rank has a GPU of its own.

        Returns
        -------
        list of Future
            As from `run`. Ranks raise `CollectiveError` if torch cannot start on one of them.
        """
        return self.run(partial(run_with_torch, function, backend), blocks, *state)

    @property
    def _scheduler(self) -> Any:
        return activation.scheduler_of(self._client)

    def rebuild(self) -> Communicator:
        """Return a communicator for the workers that are still there.

        If none of them is, and they were all workers, it is for those that are there now.

        With an asynchronous client: an awaitable of it.
        """
        return self._client.sync(self._rebuild)  # type: ignore[no-any-return]

    async def _rebuild(self) -> Communicator:
        workers = self.workers
        if workers is not None:
            there = (await self._scheduler.identity(n_workers=-1))["workers"]
            # Before a gang has begun, these may be names.
            known = {*there, *(one["id"] for one in there.values())}
            workers = [one for one in workers if one in known]
            if not workers and self._has_all:
                workers = None
        rebuilt = Communicator(self._client, workers, self._timeout_s)
        rebuilt._has_all = self._has_all
        return rebuilt

    async def _run(
        self,
        step: Callable[..., Any],
        blocks: Any,
        state: Sequence[Any],
        holder: str | None,
        caller: Any,
    ) -> list[Future[Any]]:
        client, name = self._client, uuid4().hex
        status = await activation.read_status(client, ask_workers=False)
        if not status["active"]:
            raise ActivationError(
                f"dask_gpurt is off on this cluster ({status['reason']}); "
                "call dask_gpurt.enable(client) first"
            )
        if status["collectives"] is None:
            raise ActivationError(
                "gpurt.collectives.enabled is false on this cluster; call"
                " dask_gpurt.disable(client), set it to true, then call dask_gpurt.enable(client)"
            )
        rows = await self._rows(blocks)
        self._names.append(name)
        try:
            answer = await self._scheduler.gpurt_gang_begin(
                name=name,
                client=client.id,
                workers=self.workers,
                timeout_s=self._timeout_s,
                holder=holder,
                caller=caller,
            )
            if answer["why_not"] is not None:
                raise GangError(answer["why_not"])
            self.workers = workers = list(answer["workers"])
            of_rank = await self._dealt(rows, workers)
            futures = [
                client.submit(
                    run_rank,
                    name,
                    rank,
                    step,
                    of_rank[rank],
                    list(state),
                    key=rank_key(name, rank),
                    workers=[address],
                    allow_other_workers=False,
                    pure=False,
                    retries=0,
                    priority=PRIORITY,
                )
                for rank, address in enumerate(workers)
            ]
        except BaseException:
            # Also of an interrupt while it waits for other gangs.
            await self._cancel([name])
            self._names.remove(name)
            raise
        if self._is_entered:
            keeping = asyncio.create_task(_kept(futures))
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)
        return futures

    async def _cancel(self, names: Sequence[str]) -> None:
        with contextlib.suppress(OSError):
            await asyncio.shield(self._scheduler.gpurt_gang_wait(names=names, cancel=True))

    async def _rows(self, blocks: Any) -> list[tuple[Future[Any], ...]]:
        """Return the blocks of each position as futures, when all are in memory."""
        if blocks is None:
            return []
        several = blocks if isinstance(blocks, tuple) else (blocks,)
        columns = [await self._futures(one) for one in several]
        if len({len(column) for column in columns}) > 1:
            lengths = " and ".join(str(len(column)) for column in columns)
            raise ValueError(f"collections of {lengths} blocks have no common positions")
        return list(zip(*columns, strict=True))

    async def _futures(self, blocks: Any) -> list[Future[Any]]:
        if not dask.is_dask_collection(blocks):
            found = list(blocks)
            if not all(isinstance(one, Future) for one in found):
                raise TypeError("blocks must be a Dask collection, or a list of futures")
        else:
            # Computes nothing again that is persisted already.
            (blocks,) = self._client.persist([blocks])
            held = {_position(future.key): future for future in futures_of(blocks)}
            found = [held[_position(key)] for key in flatten(blocks.__dask_keys__())]
        await wait(found)
        for future in found:
            if future.status != "finished":
                await future  # raises its error
        return found

    async def _dealt(
        self, rows: Sequence[tuple[Future[Any], ...]], workers: Sequence[str]
    ) -> list[list[Any]]:
        """Return the blocks of each rank: those on its worker, and some of those on no worker."""
        of_rank: list[list[Any]] = [[] for _ in workers]
        if not rows:
            return of_rank
        ranks = {address: rank for rank, address in enumerate(workers)}
        holders = await self._scheduler.who_has(keys=[row[0].key for row in rows])
        for row in rows:
            here = [ranks[one] for one in holders.get(row[0].key, ()) if one in ranks]
            rank = min(here or range(len(workers)), key=lambda one: len(of_rank[one]))
            of_rank[rank].append(row if len(row) > 1 else row[0])
        return of_rank

    # ------------------------------------------------------------------ context manager

    async def _close(self, cancel: bool) -> None:
        names, self._names = self._names, []
        self._is_entered = False
        try:
            if names and self._client.scheduler is not None:
                await (self._cancel(names) if cancel else self._ended(names))
        finally:
            for keeping in self._keeping:
                keeping.cancel()

    async def _ended(self, names: Sequence[str]) -> None:
        """Wait for gangs. An interrupt ends them: later runs would wait for them."""
        try:
            with contextlib.suppress(OSError):
                await self._scheduler.gpurt_gang_wait(names=names, cancel=False)
        except BaseException:
            await self._cancel(names)
            raise

    def __enter__(self) -> Communicator:
        if self._client.asynchronous:
            # At the end of the block, nothing would await its runs.
            raise TypeError("this client is asynchronous; write `async with Communicator(client):`")
        self._is_entered = True
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        self._client.sync(self._close, error is not None)

    async def __aenter__(self) -> Communicator:
        self._is_entered = True
        return self

    async def __aexit__(self, error: Any, *_: Any) -> None:
        await self._close(error is not None)


async def _kept(futures: Sequence[Future[Any]]) -> None:
    """Keep futures until their tasks have ended. `wait` would raise if one is cancelled."""
    for future in futures:
        await future.exception()


def _position(key: Any) -> Any:
    """Return the position of a block. The name may change when a DataFrame is persisted."""
    return key[1:] if isinstance(key, tuple) else key


def _this_task() -> tuple[str | None, Any]:
    """Return the worker whose thread the calling task keeps, if any, and the task's key."""
    try:
        worker = get_worker()
    except ValueError:
        return None, None
    key = worker.get_current_task()
    # `secede` gives the thread back at once, before the scheduler knows.
    keeps = getattr(thread_state, "proceed", False)
    return (worker.address if keeps else None), key
