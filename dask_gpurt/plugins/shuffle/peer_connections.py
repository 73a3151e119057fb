"""Connections of a worker for shuffle messages, apart from those that Dask's own calls use.

Dask's pool has a limit, and a worker's heartbeats use it too. If many messages wait for their
receivers, a heartbeat would wait behind them, and the scheduler would take the worker for dead.
Messages over UCX and shared memory use these connections for their headers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.core import ConnectionPool

from dask_gpurt.plugins.patches.connections import LostPeers
from dask_gpurt.shuffle.credits import FEW_PEERS, N_MESSAGES

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.comm import Comm

#: Highest limit of open files that `allow_open_files` sets. Some programs close every possible file
#: before they start another program. With a larger limit, that takes too long.
_MOST_FILES = 1 << 16
#: One of this many open files is for a connection to a peer. Peers open as many to this worker. A
#: connection that is closed to make room for another takes its file for a while longer.
_FILES_EACH = 8
#: A pool has room for at least this many connections.
_LEAST = 2
#: All pools of this process that are in use: they share its files.
_pools: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def open_files() -> tuple[int, int]:
    """Return how many files this process may open now, and how many it could be allowed."""
    import resource  # Windows lacks it, and clients there import this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MOST_FILES if one == resource.RLIM_INFINITY else one for one in (soft, hard))
    return soft, max(soft, min(hard, _MOST_FILES))


def allow_open_files() -> None:
    """Raise the limit on this process's open files as far as the system allows."""
    import resource

    soft, most = open_files()
    if soft < most:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def needed_files(n_workers: int) -> int:
    """Return how many open files a worker needs to keep its connections to all others.

    A worker that may open fewer closes connections between messages, and makes new ones.
    """
    n_peers = n_workers - 1
    # A few peers get more connections each than many do.
    return _FILES_EACH * max(n_peers, N_MESSAGES * min(n_peers, FEW_PEERS))


def most_workers(n_files: int) -> int:
    """Return the number of workers for which this many open files are enough."""
    n_connections = n_files // _FILES_EACH
    n_peers = n_connections // N_MESSAGES
    return (n_connections if n_peers >= FEW_PEERS else n_peers) + 1


class PeerConnections:
    """The connections of one worker for shuffle messages. On the event loop.

    Parameters
    ----------
    on_loss
        Called with the address of a peer that left.
    """

    def __init__(
        self, worker: Worker, on_loss: Callable[[str], None] = lambda address: None
    ) -> None:
        self._worker, self._on_loss = worker, on_loss
        self._pool: ConnectionPool | None = None
        self._lost: LostPeers | None = None
        self._n_calls = 0
        self._is_over = False
        _pools.add(self)

    async def receive(self, address: str, **message: Any) -> dict[str, Any]:
        """Call a peer's handler for shuffle messages, and return its answer. Raises as `call`."""
        return await self.call(address, "shuffle_receive", **message)

    async def call(self, address: str, handler: str, **message: Any) -> dict[str, Any]:
        """Call a peer's handler, and return its answer.

        Raises
        ------
        OSError
            The peer cannot be reached, or this worker is closed.
        """
        self._n_calls += 1
        try:
            pool = await self.pool()
            answer: dict[str, Any] = await getattr(pool(address), handler)(**message)
            return answer
        finally:
            self._n_calls -= 1

    async def pool(self) -> ConnectionPool:
        """Return the pool of connections, and make it if there is none."""
        if self._is_over:
            raise OSError(f"{self._worker.address} is closed")
        if self._pool is None:
            _pools.add(self)
            n_files, _ = open_files()
            stock = self._worker.rpc
            pool = ConnectionPool(
                limit=max(_LEAST, n_files // (_FILES_EACH * len(_pools))),
                deserialize=stock.deserialize,
                serializers=stock.serializers,
                deserializers=stock.deserializers,
                connection_args=stock.connection_args,
                timeout=stock.timeout,
                server=self._worker,
            )
            # Before the pool starts, which may let other calls in.
            self._pool, self._lost = pool, LostPeers(self._worker.rpc, self._lose)
            await pool.start()
        return self._pool

    def _lose(self, address: str) -> None:
        if self._pool is not None:
            self._pool.remove(address)
        self._on_loss(address)

    def to(self, address: str) -> list[Comm]:
        """Return the open connections to a peer."""
        pool = self._pool
        if pool is None:
            return []
        return [*pool.available.get(address, ()), *pool.occupied.get(address, ())]

    @property
    def is_busy(self) -> bool:
        """Whether a peer's answer is awaited."""
        return bool(self._n_calls)

    def rest(self) -> None:
        """Close idle connections."""
        if self._pool is not None:
            self._pool.collect()

    async def close(self, *, for_good: bool = False) -> None:
        """Close all connections. Unless it is for good, the next message makes new ones."""
        self._is_over = self._is_over or for_good
        # Something may keep the closed worker, and so this object. Its files are for other pools.
        _pools.discard(self)
        pool, self._pool = self._pool, None
        if self._lost is not None:
            self._lost.uninstall()
            self._lost = None
        if pool is not None:
            await pool.close()
