"""The memory budget that the shards of all runs on one worker share (`shuffle.shards`)."""

from __future__ import annotations

import threading

#: Shards may always take this share of their limit, however short of memory the worker is.
LEAST_SHARE = 0.1


class Budget:
    """Memory budget that the shards of all runs on one worker share.

    Attributes
    ----------
    most_nbytes
        Limit while the worker has memory to spare.
    limit_nbytes
        Limit now.
    on_disk_nbytes
        Bytes of these shards on disk. Some of them may be in memory too.
    """

    def __init__(self, most_nbytes: int) -> None:
        self._lock = threading.Lock()
        self._used_nbytes = 0
        self._withheld_nbytes = 0
        self.most_nbytes = most_nbytes
        self.on_disk_nbytes = 0

    @property
    def limit_nbytes(self) -> int:
        return max(int(LEAST_SHARE * self.most_nbytes), self.most_nbytes - self._withheld_nbytes)

    @property
    def is_lowered(self) -> bool:
        """Whether the worker is short of memory."""
        return self._withheld_nbytes > 0

    def lower_limit(self, nbytes: int) -> None:
        """Set the limit to the bytes in use less `nbytes`: the worker is short of memory."""
        with self._lock:
            taken = min(self._used_nbytes, self.limit_nbytes)
            self._withheld_nbytes = min(self.most_nbytes, self.most_nbytes - taken + nbytes)

    def raise_limit(self, nbytes: int) -> None:
        """Raise the limit by `nbytes`, up to `most_nbytes`: the worker has memory again."""
        with self._lock:
            self._withheld_nbytes = max(0, self._withheld_nbytes - nbytes)

    @property
    def used_nbytes(self) -> int:
        return self._used_nbytes

    def change(self, nbytes: int) -> None:
        with self._lock:
            self._used_nbytes += nbytes

    def change_on_disk(self, nbytes: int) -> None:
        with self._lock:
            self.on_disk_nbytes += nbytes
