"""The budget of a worker for all shards that wait to be sent, to all peers and by all runs.

Peers share it by a dynamic threshold: a peer may use a multiple of the bytes that are still free.
So a slow peer cannot take all of it, and the more peers are slow, the less each of them takes.
Equal shares are impossible: nobody knows how many peers will come. The queues are `outbox`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

#: A peer may use this many times the free bytes. One slow peer gets two thirds of the budget.
_THRESHOLD = 2


class SendBudget:
    """Bytes that may wait to be sent by one worker. Thread-safe.

    A single shard may exceed the budget while nothing else waits, so every producer gets its turn.

    Parameters
    ----------
    limit_nbytes
        Bytes that may wait or be in flight.
    is_memory_short
        Returns whether memory of shards that were sent is still in use. Shards share pages, so one
        that waits for a slow peer keeps those of all others on its page.

    Attributes
    ----------
    changed
        Guards the budget and all queues that use it. Notified when bytes were sent.
    limit_nbytes
        May be changed at any time.
    """

    def __init__(
        self, limit_nbytes: int, is_memory_short: Callable[[], bool] = lambda: False
    ) -> None:
        self.changed = threading.Condition()
        self.limit_nbytes = limit_nbytes
        self._is_memory_short = is_memory_short
        self._used_nbytes = 0
        self._wanted: dict[Hashable, int] = {}

    @property
    def used_nbytes(self) -> int:
        """Bytes that wait or are in flight."""
        return self._used_nbytes

    @property
    def most_nbytes(self) -> int:
        """The limit, and what runs want beyond it."""
        return self.limit_nbytes + sum(self._wanted.values())

    def want(self, owner: Hashable, nbytes: int) -> None:
        """Add this much to the limit until `forget`, for shards in other memory."""
        with self.changed:
            self._wanted[owner] = nbytes
            self.changed.notify_all()

    def forget(self, owner: Hashable) -> None:
        """Withdraw what an owner wanted."""
        with self.changed:
            self._wanted.pop(owner, None)

    def has_room(self, nbytes: int, peer_nbytes: int) -> bool:
        """Return whether a shard may be queued. The caller holds `changed`.

        Parameters
        ----------
        peer_nbytes
            Bytes of the same run that wait for the same peer, or are in flight to it.
        """
        if not self._used_nbytes:
            return True
        free_nbytes = self.most_nbytes - self._used_nbytes
        if nbytes > free_nbytes or self._is_memory_short():
            return False
        return not peer_nbytes or peer_nbytes + nbytes <= _THRESHOLD * free_nbytes

    def take(self, nbytes: int) -> None:
        """Count bytes. The caller holds `changed`."""
        self._used_nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Release bytes and wake producers. The caller holds `changed`."""
        self._used_nbytes -= nbytes
        self.changed.notify_all()
