"""The disk tier: one numbered file for each value, in a directory that only this process uses.

`memory.files.value_io` writes and reads the files, and `memory.files.directory` owns the directory.
This module does the accounting and handles errors: a value is kept whole, or not at all.

Locking: `_lock` guards the accounting and is never held over I/O. A file is needed only until it is
open, so a value may be dropped while it is read.

Files that went through the page cache are removed later (`memory.files.remover`), because a removal
may wait for the disk.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dask_gpurt.errors import DamagedValueError, TierFullError, ValueRefusedError
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.decisions.backoff import Backoff, LogThrottle
from dask_gpurt.memory.decisions.write_speeds import WriteSpeeds
from dask_gpurt.memory.files.block_io import empty_blocks
from dask_gpurt.memory.files.directory import ValueDirectory
from dask_gpurt.memory.files.remover import Remover
from dask_gpurt.memory.files.value_file import CODERS, Bytes
from dask_gpurt.memory.files.value_io import DiskPlace, EncodedValue, ValueFiles, encoded

logger = logging.getLogger("dask_gpurt.memory")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Called with `disk-write` or `disk-read`, the bytes and the seconds, in the thread of the I/O.
OnIO = Callable[[str, int, float], None]


class DiskTier:
    """A `memory.tiers.Tier` that keeps values in files.

    Parameters
    ----------
    directory
        Directory in which the tier creates its own one, on first use.
    capacity_nbytes
        Most bytes of files; None for no limit but the disk.
    compression
        `lz4` or `zstd`: compress large buffers where that makes them smaller.
    on_io
        Called after every read and write that succeeded.
    cache_takes
        Whether the page cache has room for that many bytes (`memory.files.page_cache`). Where both
        are possible, values go through the cache or past it, whichever was faster so far.
    empty
        Allocates the memory that values are read into. Memory that is not on a 4 KiB boundary is
        filled through the page cache.
    system, clock
        The module `os` and a clock, or fakes in tests.
    locks, aside
        As for `memory.files.directory.ValueDirectory`.
    """

    name = "disk"

    def __init__(
        self,
        directory: str,
        capacity_nbytes: int | None = None,
        compression: str | None = None,
        on_io: OnIO | None = None,
        *,
        cache_takes: Callable[[int], bool] = lambda nbytes: False,
        empty: Callable[[int], Bytes] = empty_blocks,
        system: Any = os,
        clock: Callable[[], float] = time.monotonic,
        locks: bool = True,
        aside: str | None = None,
    ) -> None:
        if compression is not None and compression not in CODERS[1:]:
            raise ValueError(f"no coder is called {compression!r}: {', '.join(CODERS[1:])}")
        self.capacity_nbytes = capacity_nbytes
        self._coder = CODERS.index(compression) if compression else 0
        self._on_io = on_io or (lambda label, nbytes, seconds: None)
        self._clock = clock
        self._cache_takes = cache_takes
        self._directory = ValueDirectory(directory, system, locks=locks, aside=aside)
        self._files = ValueFiles(system, empty)
        self._remover = Remover(self._files.remove)
        self._numbers = itertools.count()
        self._first_identity = secrets.randbits(62)
        self._lock = threading.Lock()
        #: Bytes of each kept file, by path.
        self._kept: dict[str, int] = {}
        self._used_nbytes = 0
        self._n_writing = 0
        self._closed = False
        self._speeds = WriteSpeeds()
        self._backoff = Backoff()
        self._log_throttle = LogThrottle()

    @property
    def used_nbytes(self) -> int:
        """Bytes of files, including those that are being written."""
        return self._used_nbytes

    def probe(self) -> dict[str, Any]:
        """Return where and how values are written, for `status` and `doctor`.

        This creates the directory if necessary, and never raises.

        Returns
        -------
        dict
            `directory`; `is_direct`, whether files can be written past the page cache, None if
            unknown; `problem`, why nothing can be written there, None if there is none.
        """
        found: dict[str, Any] = {"directory": self._directory.parent, "is_direct": None}
        with self._lock:
            closed = self._closed
        if closed:
            return {**found, "problem": "the store was closed"}
        try:
            found["directory"], found["is_direct"] = self._directory.ready()
        except OSError as error:
            return {**found, "problem": error.strerror or str(error)}
        return {**found, "problem": None}

    # -------------------------------------------------------------- in

    def put(self, flat: Flat) -> DiskPlace:
        """Write a value to a file of its own."""
        self._check_ready()
        value = encoded(flat, self._coder)
        began_s = self._clock()
        with self._reserved(value.nbytes):
            try:
                place = self._write_after_removals(value)
            except OSError as error:
                self._failed(error)
                if error.errno in _FULL:
                    raise TierFullError(f"no room on disk: {error}") from error
                raise
            with self._lock:
                # If the tier was closed meanwhile, the file goes with the directory.
                if self._closed:
                    raise TierFullError("the disk tier was closed")
                self._kept[place.path] = place.nbytes
                self._backoff = Backoff()
                took_s = self._clock() - began_s
                # Small values always go through the cache, and tell little of it.
                if place.blocks:
                    self._speeds.record(place.is_direct, place.nbytes, took_s)
        self._on_io("disk-write", place.nbytes, took_s)
        return place

    def _check_ready(self) -> None:
        with self._lock:
            closed, backoff = self._closed, self._backoff
        if closed:
            raise TierFullError("the disk tier was closed")
        wait_s = backoff.until_s - self._clock()
        if backoff.is_waiting(self._clock()):
            raise TierFullError(f"writing to disk failed and is retried in {wait_s:.0f} s")

    @contextmanager
    def _reserved(self, nbytes: int) -> Iterator[None]:
        """Count bytes before they are written, and discount them after an error."""
        with self._lock:
            capacity = self.capacity_nbytes
            if capacity is not None and nbytes > capacity:
                # Refused, not full: a full tier is blocked, and smaller values would have to wait.
                raise ValueRefusedError(f"{nbytes} bytes exceed the disk limit of {capacity}")
            if capacity is not None and self._used_nbytes + nbytes > capacity:
                raise TierFullError(
                    f"{nbytes} bytes do not fit on disk: {self._used_nbytes} of {capacity} are used"
                )
            self._used_nbytes += nbytes
            self._n_writing += 1
        try:
            yield
        except BaseException:
            with self._lock:
                self._used_nbytes -= nbytes
            raise
        finally:
            with self._lock:
                self._n_writing -= 1
                is_last = self._closed and not self._n_writing
            if is_last:
                self._directory.remove()

    def _write_after_removals(self, value: EncodedValue) -> DiskPlace:
        """Write a value. If the disk is full, try once more after all removals so far."""
        makes_room = self._remover.is_busy
        try:
            return self._write(value)
        except OSError as error:
            if error.errno not in _FULL or not makes_room:
                raise
        self._remover.wait()
        return self._write(value)

    def _write(self, value: EncodedValue) -> DiskPlace:
        directory, is_direct = self._directory.ready()
        try:
            return self._write_into(directory, is_direct, value)
        except FileNotFoundError:
            if not self._directory.is_lost(directory):
                raise
            # Values that were in it are lost; this one is not.
            logger.warning("%s was removed by another program; a new one is created", directory)
        directory, is_direct = self._directory.ready()
        return self._write_into(directory, is_direct, value)

    def _write_into(self, directory: str, is_direct: bool, value: EncodedValue) -> DiskPlace:
        number = next(self._numbers)
        path = os.path.join(directory, f"{number:08d}")
        if is_direct and self._prefers_cache():
            is_direct = not self._cache_takes(value.nbytes)
        return self._files.write(path, value, self._first_identity + number, is_direct)

    def _prefers_cache(self) -> bool:
        with self._lock:
            return self._speeds.prefers_cache

    def _failed(self, error: OSError) -> None:
        """Log an error once, and refuse writes until a retry delay is over."""
        now_s = self._clock()
        reason = error.strerror or str(error)
        with self._lock:
            self._backoff = self._backoff.after_failure(now_s)
            is_due = self._log_throttle.is_due(reason, now_s)
        if is_due:
            logger.error(
                "cannot write to %s (%s); values stay in memory, and writing is retried later. "
                "Free some space, or point Dask's temporary-directory to another disk.",
                self._directory.parent,
                reason,
            )

    # -------------------------------------------------------------- out

    def get(self, place: DiskPlace) -> Flat:
        """Read a value, each large buffer into memory of its own."""
        with self._lock:
            is_kept = place.path in self._kept
        if not is_kept:
            # Its file may still be there.
            raise DamagedValueError(f"{place.path} does not hold its value: it was dropped")
        began_s = self._clock()
        flat = self._files.read(place)
        self._on_io("disk-read", place.nbytes, self._clock() - began_s)
        return flat

    def drop(self, place: DiskPlace) -> None:
        """Remove a file. A second call does nothing."""
        with self._lock:
            nbytes = self._kept.pop(place.path, None)
            self._used_nbytes -= nbytes or 0
        if nbytes is None:
            return
        if place.blocks and not place.is_direct:
            self._remover.submit(place.path)
        else:
            self._files.remove(place.path)

    def close(self) -> None:
        """Remove the directory: now, or after the last write in flight.

        distributed keeps closed workers in the process, so memory is freed here.
        """
        with self._lock:
            self._closed = True
            self._used_nbytes -= sum(self._kept.values())
            self._kept.clear()
            is_quiet = not self._n_writing
        self._files.close()
        self._remover.close()
        if is_quiet:
            self._directory.remove()
