"""A bounded recorder: events from any thread go to one file, through a thread of its own.

Adding an event appends it to a list. The thread encodes the list a few times a second
(`tracing.records`) and appends a block to the file. The file has no name, so the system frees it
however the process ends. More events than `MOST_EVENTS_PER_S` are
dropped and counted. At the limit of bytes, or where the disk is full, the recording ends.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from dask.utils import format_bytes, key_split

from dask_gpurt.devices.ledger import LedgerEntry
from dask_gpurt.system_calls import write_all
from dask_gpurt.tracing.records import RecordEncoder, key_hash

logger = logging.getLogger("dask_gpurt")

#: More events a second than this are dropped.
MOST_EVENTS_PER_S = 100_000
#: Time between two blocks of a file.
_TURN_S = 0.2
_MOST_A_TURN = int(MOST_EVENTS_PER_S * _TURN_S)
#: Most keys whose numbers are remembered. A key that is forgotten gets another number.
_MOST_KEYS = 100_000
#: Most events in one block: encoding holds the interpreter's lock, so it is done in steps.
_MOST_IN_BLOCK = 5_000

#: A call that adds one event to an encoder.
Encode = Callable[[RecordEncoder], None]


class EventRecorder:
    """Records events into a file until `stop`; the file stays readable until `close`.

    Parameters
    ----------
    directory
        Where the file is; by default, where temporary files are.
    limit_nbytes
        Most bytes of the file.
    full_keys
        Whether the file has whole keys of tasks instead of their prefixes.
    """

    def __init__(self, directory: str | None, limit_nbytes: int, *, full_keys: bool) -> None:
        #: Bytes of the file that are whole blocks.
        self.nbytes = 0
        self.n_events = 0
        self.n_dropped = 0
        #: Why the recording ended early; empty if it did not.
        self.ended = ""
        self._limit_nbytes = limit_nbytes
        self._full_keys = full_keys
        self._lock = threading.Lock()
        self._items: list[LedgerEntry | Encode] = []
        self._is_open = True
        self._stopping = threading.Event()
        self._encoder = RecordEncoder()
        self._keys: dict[Any, int] = {}
        self._n_keys = 0
        self._directory = directory
        self._file: IO[bytes] | None = None
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115
        except OSError as error:
            self._end_at(error)
        self._thread = threading.Thread(target=self._serve, name="gpurt trace", daemon=True)
        self._thread.start()

    def work(self, entry: LedgerEntry) -> None:
        """Add an entry of a ledger. Called in the thread that made it."""
        if not entry.thread:
            entry = entry._replace(thread=threading.get_ident())
        self.add(entry)

    def add(self, item: LedgerEntry | Encode) -> None:
        """Add an event: an entry, or a call that encodes one later."""
        with self._lock:
            if not self._is_open:
                return
            if len(self._items) >= _MOST_A_TURN:
                self.n_dropped += 1
            else:
                self._items.append(item)

    def key_number(self, key: Any) -> int:
        """Return the number of a key in the file. Only encoding calls may use it."""
        number = self._keys.get(key)
        if number is None:
            if len(self._keys) >= _MOST_KEYS:
                self._keys.clear()
            self._n_keys += 1
            number = self._keys[key] = self._n_keys
            self._encoder.key(number, key_hash(key), self.shown(key))
        return number

    def shown(self, key: Any) -> str:
        """Return the text for a key, as the user wants it."""
        return str(key) if self._full_keys else str(key_split(key))

    def stop(self) -> None:
        """Write what is there, and end. Blocks; any thread but the recorder's."""
        self._stopping.set()
        self._thread.join()

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file; empty at its end. Blocks."""
        if self._file is None:
            return b""
        return os.pread(self._file.fileno(), max(min(nbytes, self.nbytes - offset), 0), offset)

    def close(self) -> None:
        """End and remove the file. Blocks. Repeated calls do nothing."""
        self.stop()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(_TURN_S)
            with self._lock:
                items, self._items = self._items, []
                if is_last:
                    self._is_open = False
            for first in range(0, len(items), _MOST_IN_BLOCK):
                self._write(items[first : first + _MOST_IN_BLOCK])

    def _write(self, items: list[LedgerEntry | Encode]) -> None:
        if self.ended:
            return
        for item in items:
            try:
                self._encode(item)
            except Exception as error:
                # Others say what tasks did and needed. One wrong event must not cost the rest.
                logger.debug("an event cannot be recorded: %r", error)
                self.n_dropped += 1
        n_events = self._encoder.n_pending
        block = self._encoder.block()
        if self.nbytes + len(block) > self._limit_nbytes:
            return self._end(f"limit of {format_bytes(self._limit_nbytes)}")
        assert self._file is not None
        try:
            write_all(self._file.fileno(), block, self.nbytes)
        except OSError as error:
            return self._end_at(error)
        self.nbytes += len(block)
        self.n_events += n_events

    def _encode(self, item: LedgerEntry | Encode) -> None:
        if not isinstance(item, LedgerEntry):
            return item(self._encoder)
        number = 0 if item.key is None else self.key_number(item.key)
        self._encoder.work(*item[:-3], number, item.thread, item.encoded_nbytes)

    def _end_at(self, error: OSError) -> None:
        where = self._directory or "the folder of temporary files"
        self._end(f"cannot write to {where}: {error.strerror}")

    def _end(self, why: str) -> None:
        """End the recording for good. What the file has stays."""
        self.ended = why
        logger.warning("a trace ends here: %s", why)
        with self._lock:
            self._is_open = False
            self._items = []
