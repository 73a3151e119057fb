"""What distributed's dashboard reads of a run: the fields that stock's buffers send.

The worker's heartbeat carries them, and the page of P2P shuffles draws them. A field that is
missing is an error in the scheduler's log, ten times a second for each page that is open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Writes:
    """How many writes there were, and how long they took. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._nbytes, self._seconds = 0, 0, 0.0

    def add(self, nbytes: int, seconds: float = 0.0) -> None:
        """One more write."""
        with self._lock:
            self._count += 1
            self._nbytes += nbytes
            self._seconds += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Writes go on inside, and are added without their time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - began

    def shown(
        self, *, memory_nbytes: int, limit_nbytes: int, read_nbytes: int, n_buckets: int
    ) -> dict[str, Any]:
        """Fields of one buffer: the bytes that wait in it, and those that went through it."""
        with self._lock:
            count = max(self._count, 1)
            return {
                "memory": memory_nbytes,
                "total": memory_nbytes + self._nbytes,
                "buckets": n_buckets,
                "written": self._nbytes,
                "read": read_nbytes,
                "avg_size": self._nbytes / count,
                "avg_duration": self._seconds / count,
                "memory_limit": limit_nbytes,
            }
