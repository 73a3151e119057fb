"""The fields of a run's heartbeat that distributed's dashboard reads.

The worker's heartbeat carries the fields that stock buffers report, and the dashboard's page of P2P
shuffles draws them. A missing field logs an error on the scheduler, ten times a second for each
open page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Writes:
    """A counter of writes, their bytes and their duration. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._nbytes, self._seconds = 0, 0, 0.0

    def add(self, nbytes: int, seconds: float = 0.0) -> None:
        """Count one write."""
        with self._lock:
            self._count += 1
            self._nbytes += nbytes
            self._seconds += seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the duration of the block; `add` counts the writes in it without their time."""
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - began

    def shown(
        self, *, memory_nbytes: int, limit_nbytes: int, read_nbytes: int, n_buckets: int
    ) -> dict[str, Any]:
        """Return the fields of one buffer: bytes waiting in it, and bytes that passed through."""
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
