"""Connections of a worker for shuffle messages, apart from those that Dask's own calls use.

Dask's pool has a limit, and a worker's heartbeats use it too. Behind many messages that wait for
their receivers, a heartbeat would wait as well, and the scheduler would take the worker for dead.
Messages over UCX and shared memory use these connections for their headers.
"""

from __future__ import annotations

import contextlib
import resource
import weakref
from typing import TYPE_CHECKING, Any

from distributed.core import ConnectionPool

from dask_gpurt.plugins.patches.connections import LostPeers

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.comm import Comm

#: Open files that a worker is allowed at most by `allow_open_files`. Programs that close every
#: possible file, as some do before they start another, take too long with a larger limit.
_MOST_FILES = 1 << 16
#: Part of the open files for connections to peers. As many come from peers.
_SHARE = 1 / 4
#: A pool has room for at least this many connections, and so never stops.
_LEAST = 8
#: Open files of a worker besides its connections for messages.
_OTHER_FILES = 128
#: All pools of this process: they share its files.
_pools: weakref.WeakSet[PeerConnections] = weakref.WeakSet()


def allow_open_files() -> int:
    """Raise the limit on this process's open files as far as it may; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def needed_files(n_workers: int) -> int:
    """Return the open files with which a worker keeps its connections to all others.

    With fewer, it closes connections between messages, and makes new ones.
    """
    # Two messages at a time go to each peer, and come from it.
    return _OTHER_FILES + 4 * (n_workers - 1)


def most_workers(n_files: int) -> int:
    """Return the number of workers for which this many open files are enough."""
    return max(1, (n_files - _OTHER_FILES) // 4 + 1)


class PeerConnections:
    """The connections of one worker for shuffle messages. On the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._pool: ConnectionPool | None = None
        self._lost: LostPeers | None = None
        self._n_calls = 0
        self._is_over = False
        _pools.add(self)

    async def receive(self, address: str, **message: Any) -> dict[str, Any]:
        """Call a peer's handler for shuffle messages, and return its answer.

        Raises
        ------
        OSError
            The peer cannot be reached, or this worker is closed.
        """
        self._n_calls += 1
        try:
            pool = await self.pool()
            answer: dict[str, Any] = await pool(address).shuffle_receive(**message)
            return answer
        finally:
            self._n_calls -= 1

    async def pool(self) -> ConnectionPool:
        """Return the pool of connections, and make it if there is none."""
        if self._is_over:
            raise OSError(f"{self._worker.address} is closed")
        if self._pool is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            n_files = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
            stock = self._worker.rpc
            pool = ConnectionPool(
                limit=max(_LEAST, int(_SHARE * n_files) // len(_pools)),
                deserialize=stock.deserialize,
                serializers=stock.serializers,
                deserializers=stock.deserializers,
                connection_args=stock.connection_args,
                timeout=stock.timeout,
                server=self._worker,
            )
            # Before the pool starts, which may let other calls in.
            self._pool, self._lost = pool, LostPeers(self._worker, pool.remove)
            await pool.start()
        return self._pool

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
        pool, self._pool = self._pool, None
        if self._lost is not None:
            self._lost.uninstall()
            self._lost = None
        if pool is not None:
            await pool.close()
