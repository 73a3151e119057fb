"""The disk tier: one file a value, named by a number, in a directory of this process alone.

How a value becomes a file is the business of `memory.files.value_io`, whose files may be removed
that of `memory.files.directory`. This module keeps the account and deals with what goes wrong: a
value is either kept whole, or not at all.

Locking: `_lock` guards the account and is never held over I/O. Nothing here needs a file to be
there for longer than it takes to open it, so a value may be dropped while it is read.
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

from dask_gpurt.errors import TierFullError, ValueRefusedError
from dask_gpurt.frames.flat.values import Flat
from dask_gpurt.memory.decisions.backoff import Backoff, LogThrottle
from dask_gpurt.memory.files.block_io import empty_blocks
from dask_gpurt.memory.files.directory import ValueDirectory
from dask_gpurt.memory.files.value_file import CODERS, Bytes
from dask_gpurt.memory.files.value_io import DiskPlace, Encoded, ValueFiles, encoded

logger = logging.getLogger("dask_gpurt.memory")

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Told `disk-write` or `disk-read`, how many bytes and how long, in the thread that did it.
OnIO = Callable[[str, int, float], None]


class DiskTier:
    """Keeps values in files; a `memory.tiers.Tier`.

    Parameters
    ----------
    directory
        Where this tier makes a directory of its own, when it is first needed.
    capacity_nbytes
        Most bytes of files; None for as much as the disk takes.
    compression
        `lz4` or `zstd`: compress large buffers, and keep what came of it where it is smaller.
    on_io
        Told about every read and write that succeeded.
    empty
        Where the memory comes from that values are read into. What does not lie on a 4 KiB boundary
        is read through the page cache.
    system, clock
        The module `os` and a clock, but in tests.
    locks
        Whether files are locked (`memory.files.directory`).
    """

    name = "disk"

    def __init__(
        self,
        directory: str,
        capacity_nbytes: int | None = None,
        compression: str | None = None,
        on_io: OnIO | None = None,
        *,
        empty: Callable[[int], Bytes] = empty_blocks,
        system: Any = os,
        clock: Callable[[], float] = time.monotonic,
        locks: bool = True,
    ) -> None:
        if compression is not None and compression not in CODERS[1:]:
            raise ValueError(f"no coder is called {compression!r}: {', '.join(CODERS[1:])}")
        self.capacity_nbytes = capacity_nbytes
        self._coder = CODERS.index(compression) if compression else 0
        self._on_io = on_io or (lambda label, nbytes, seconds: None)
        self._clock = clock
        self._directory = ValueDirectory(directory, system, locks=locks)
        self._files = ValueFiles(system, empty)
        self._numbers = itertools.count()
        self._first_identity = secrets.randbits(62)
        self._lock = threading.Lock()
        #: Bytes of what is kept, by path.
        self._kept: dict[str, int] = {}
        self._used_nbytes = 0
        self._n_writing = 0
        self._closed = False
        self._backoff = Backoff()
        self._log_throttle = LogThrottle()

    @property
    def used_nbytes(self) -> int:
        """Bytes of files, and of those that are being written."""
        return self._used_nbytes

    def look(self) -> dict[str, Any]:
        """Where values go, and how: for whoever asks before anything went wrong.

        Makes the directory if it is not there yet. Never raises.

        Returns
        -------
        dict
            `directory`; `is_direct`, whether files go past the page cache, None if that cannot be
            said; `problem`, why nothing can be written there, None if something can.
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
        self._check_it_may_be_tried()
        value = encoded(flat, self._coder)
        began_s = self._clock()
        with self._reserved(value.nbytes):
            try:
                place = self._write(value)
            except OSError as error:
                self._failed(error)
                if error.errno in _FULL:
                    raise TierFullError(f"no room on disk: {error}") from error
                raise
            with self._lock:
                # A tier that was closed meanwhile has let go of the file, or its directory will.
                if self._closed:
                    raise TierFullError("the disk tier was closed")
                self._kept[place.path] = place.nbytes
                self._backoff = Backoff()
        self._on_io("disk-write", place.nbytes, self._clock() - began_s)
        return place

    def _check_it_may_be_tried(self) -> None:
        with self._lock:
            closed, backoff = self._closed, self._backoff
        if closed:
            raise TierFullError("the disk tier was closed")
        wait_s = backoff.until_s - self._clock()
        if backoff.is_waiting(self._clock()):
            raise TierFullError(f"writing to disk failed and is tried again in {wait_s:.0f} s")

    @contextmanager
    def _reserved(self, nbytes: int) -> Iterator[None]:
        """Bytes that are accounted for before they are written, and given back on an error."""
        with self._lock:
            capacity = self.capacity_nbytes
            if capacity is not None and nbytes > capacity:
                # Of this value alone: smaller ones need not wait for it.
                raise ValueRefusedError(f"{nbytes} bytes are more than all of {capacity} on disk")
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

    def _write(self, value: Encoded) -> DiskPlace:
        directory, is_direct = self._directory.ready()
        try:
            return self._write_into(directory, is_direct, value)
        except FileNotFoundError:
            if not self._directory.lost(directory):
                raise
            # Somebody tidied up. Values that were in there are lost; this one is not.
            logger.warning("%s was removed by somebody else; another one is made", directory)
        directory, is_direct = self._directory.ready()
        return self._write_into(directory, is_direct, value)

    def _write_into(self, directory: str, is_direct: bool, value: Encoded) -> DiskPlace:
        number = next(self._numbers)
        path = os.path.join(directory, f"{number:08d}")
        return self._files.write(path, value, self._first_identity + number, is_direct)

    def _failed(self, error: OSError) -> None:
        """Say it once, and do not try again for a while."""
        now_s = self._clock()
        reason = error.strerror or str(error)
        with self._lock:
            self._backoff = self._backoff.after_failure(now_s)
            is_due = self._log_throttle.is_due(reason, now_s)
        if is_due:
            logger.error(
                "cannot write to %s (%s); values stay in memory, and it is tried again later. "
                "Free some space, or point Dask's temporary-directory to another disk.",
                self._directory.parent,
                reason,
            )

    # -------------------------------------------------------------- out

    def get(self, place: DiskPlace) -> Flat:
        """Read a value, each large buffer into memory of its own."""
        began_s = self._clock()
        flat = self._files.read(place)
        self._on_io("disk-read", place.nbytes, self._clock() - began_s)
        return flat

    def drop(self, place: DiskPlace) -> None:
        """Remove a file. One that was dropped before is dropped already."""
        with self._lock:
            nbytes = self._kept.pop(place.path, None)
            self._used_nbytes -= nbytes or 0
        if nbytes is not None:
            self._files.remove(place.path)

    def close(self) -> None:
        """Remove the directory; later if somebody is still writing to it."""
        with self._lock:
            self._closed = True
            self._used_nbytes -= sum(self._kept.values())
            self._kept.clear()
            is_quiet = not self._n_writing
        if is_quiet:
            self._directory.remove()
