"""The files in which workers and the scheduler record events: blocks of records of one size.

Each block has a checksum, the texts that its records are the first to use, and records. Numbers
stand for texts. `tracing.merge` turns records into the contents of a trace. This module knows
neither threads nor files; `plugins.tracing.event_recorder` writes the blocks.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

#: Kinds of records. A `RUN` is one run of a task as its worker saw it. `ASSIGNED`, `TIMES` and
#: `NEEDS` are parts of a run as the scheduler saw it. A `KEY` gives the number of a key on a
#: worker. A `NAME` gives the text for the number of a lane, a way or a thread.
WORK, RUN, KEY, INSTANT, SAMPLE, ASSIGNED, TIMES, NEEDS, NAME = range(1, 10)

#: Most texts in a file. Later ones become `_MORE`.
MOST_TEXTS = 1 << 20
#: Most characters of a text.
MOST_CHARACTERS = 1000
#: Longest file that is read.
MOST_NBYTES = 1 << 40

_MAGIC = b"gpT3"
_HEADER = struct.Struct("<4sIIIII")
_LENGTH = struct.Struct("<I")
_RECORD = struct.Struct("<BBHHHIIIIIQddI")
#: Fields of a record. What they mean depends on the kind; see the methods of `RecordEncoder`.
#: `lane`, `way` and `thread` are numbers of names, which are few; keys would use them up.
FIELDS = np.dtype(
    [
        ("kind", "u1"),
        ("n", "u1"),
        ("lane", "<u2"),
        ("way", "<u2"),
        ("thread", "<u2"),
        ("path", "<u4"),
        ("peer", "<u4"),
        ("key", "<u4"),
        ("run", "<u4"),
        ("message", "<u4"),
        ("nbytes", "<u8"),
        ("start_s", "<f8"),
        ("end_s", "<f8"),
        ("encoded_nbytes", "<u4"),
    ]
)
RECORD_NBYTES = _RECORD.size
_MORE = "(more)"
_MOST_SHORT, _MOST_LONG = (1 << 16) - 1, (1 << 32) - 1
#: Numbers of tasks in one record of `NEEDS`.
NEEDS_EACH = 4


def key_hash(key: Any) -> int:
    """Return a number that stands for a key in all processes. A key itself may hold user data."""
    digest = hashlib.blake2b(str(key).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def microseconds(seconds: float) -> int:
    """Return a short duration in microseconds, as a record has it."""
    return min(max(round(seconds * 1e6), 0), _MOST_LONG)


class RecordEncoder:
    """Encodes events into blocks. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self._texts: list[bytes] = [b""]
        self._names: dict[str, int] = {"": 0}
        self._first_text = 0
        self._records = bytearray()

    @property
    def n_pending(self) -> int:
        """Number of records that no block has yet."""
        return len(self._records) // RECORD_NBYTES

    def text(self, text: str) -> int:
        """Return the number that stands for a text, or for `_MORE`."""
        number = self._numbers.get(text)
        if number is None:
            if len(self._numbers) >= MOST_TEXTS and text != _MORE:
                return self.text(_MORE)
            number = self._numbers[text] = len(self._numbers)
            self._texts.append(text[:MOST_CHARACTERS].encode(errors="replace"))
        return number

    def _name(self, name: str) -> int:
        """Return the number that stands for a name; 0 if there are too many."""
        number = self._names.get(name)
        if number is None:
            if len(self._names) > _MOST_SHORT:
                return 0
            number = self._names[name] = len(self._names)
            text = self.text(name)
            self._records += _RECORD.pack(NAME, 0, number, 0, 0, text, 0, 0, 0, 0, 0, 0.0, 0.0, 0)
        return number

    def work(
        self,
        lane: str,
        path: str,
        nbytes: int,
        start_s: float,
        end_s: float,
        peer: str = "",
        way: str = "",
        run: int = 0,
        message: int = 0,
        key: int = 0,
        thread: int = 0,
        encoded_nbytes: int = 0,
    ) -> None:
        """Add work of a lane. `key` is a number that a `KEY` record explains, or 0.

        `encoded_nbytes` of 4 GiB or more do not fit, and are left out.
        """
        lane_number, way_number = self._name(lane), self._name(way)
        thread_number = self._name(str(thread)) if thread else 0
        self._records += _RECORD.pack(
            WORK,
            0,
            lane_number,
            way_number,
            thread_number,
            self.text(path),
            self.text(peer) if peer else 0,
            key,
            run & _MOST_LONG,
            message & _MOST_LONG,
            max(nbytes, 0),
            start_s,
            end_s,
            encoded_nbytes if encoded_nbytes <= _MOST_LONG else 0,
        )

    def key(self, number: int, hash_: int, shown: str) -> None:
        """Add the number of a key on this worker, its `key_hash`, and the text to show for it."""
        self._records += _RECORD.pack(
            KEY, 0, 0, 0, 0, self.text(shown), 0, number, 0, 0, hash_, 0.0, 0.0, 0
        )

    def task_run(
        self,
        key: int,
        here_s: float,
        start_s: float,
        end_s: float,
        thread: int = 0,
        away_s: float = 0.0,
    ) -> None:
        """Add a run of a task on this worker. All its inputs were here at `here_s`.

        `away_s` is as in `TaskTimes`.
        """
        name = self._name(str(thread)) if thread else 0
        early = microseconds(start_s - here_s)
        away = microseconds(away_s)
        self._records += _RECORD.pack(
            RUN, 0, 0, 0, name, 0, 0, key, 0, early, away, start_s, end_s, 0
        )

    def instant(self, name: str, at_s: float, detail: str = "") -> None:
        self._records += _RECORD.pack(
            INSTANT, 0, 0, 0, 0, self.text(name), self.text(detail), 0, 0, 0, 0, at_s, at_s, 0
        )

    def sample(self, name: str, at_s: float, value: float) -> None:
        self._records += _RECORD.pack(
            SAMPLE, 0, 0, 0, 0, self.text(name), 0, 0, 0, 0, 0, at_s, value, 0
        )

    def assigned(
        self,
        number: int,
        shown: str,
        worker: str,
        ready_s: float,
        assigned_s: float,
        known_s: float,
        nbytes: int,
        *,
        submitted_s: float | None = None,
        is_seen: bool = True,
    ) -> None:
        """Add a run of a task, as the scheduler saw it.

        A run that it did not see end failed, was given up, or goes on. It counts if its worker
        recorded it. `submitted_s` is None if the graph arrived before the trace.
        """
        early = microseconds(assigned_s - ready_s)
        # Milliseconds, since a task may wait for days; 0 stands for None.
        waited = 0 if submitted_s is None else 1 + round(max(ready_s - submitted_s, 0.0) * 1e3)
        path, peer = self.text(shown), self.text(worker)
        self._records += _RECORD.pack(
            ASSIGNED,
            0 if is_seen else 1,
            0,
            0,
            0,
            path,
            peer,
            number,
            min(waited, _MOST_LONG),
            early,
            max(nbytes, 0),
            assigned_s,
            known_s,
            0,
        )

    def times(
        self, number: int, hash_: int, here_s: float, start_s: float, end_s: float, thread: int
    ) -> None:
        """Add Dask's own times of that run, on the scheduler's clock as Dask knows it."""
        name = self._name(str(thread)) if thread else 0
        early = microseconds(start_s - here_s)
        self._records += _RECORD.pack(
            TIMES, 0, 0, 0, name, 0, 0, number, 0, early, hash_, start_s, end_s, 0
        )

    def needs(self, number: int, needed: list[int]) -> None:
        """Add the numbers of the tasks whose outputs that run needed."""
        for first in range(0, len(needed), NEEDS_EACH):
            some = needed[first : first + NEEDS_EACH]
            a, b, c, d = some + [0] * (NEEDS_EACH - len(some))
            self._records += _RECORD.pack(
                NEEDS, len(some), 0, 0, 0, a, b, number, c, d, 0, 0.0, 0.0, 0
            )

    def block(self) -> bytes:
        """Return all that was added since the last block; empty if that is nothing."""
        if not self._records:
            return b""
        texts = b"".join(_LENGTH.pack(len(one)) + one for one in self._texts)
        rest = struct.pack("<IIII", len(self._texts), len(texts), self.n_pending, self._first_text)
        body = bytes(self._records)
        checksum = zlib.crc32(body, zlib.crc32(texts, zlib.crc32(rest)))
        block = _MAGIC + _LENGTH.pack(checksum) + rest + texts + body
        self._first_text += len(self._texts)
        self._texts, self._records = [], bytearray()
        return block


class DecodedEvents(NamedTuple):
    """The content of a file.

    Attributes
    ----------
    texts
        Texts by their numbers.
    names
        Names of lanes, ways and threads by their numbers.
    records
        All records but names, with `FIELDS`.
    problem
        Why the rest of the file could not be read; empty if all was read.
    """

    texts: list[str]
    names: list[str]
    records: npt.NDArray[Any]
    problem: str = ""


def decode(data: bytes | bytearray | memoryview) -> DecodedEvents:
    """Return the events in a file, up to the first block that is damaged."""
    view = memoryview(data)
    texts: list[str] = []
    names: list[str] = [""]
    found: list[npt.NDArray[Any]] = []
    problem = ""
    position = 0
    while position < len(view):
        try:
            position, some = _decoded_block(view, position, texts, names)
        except ValueError as error:
            problem = f"damaged after {position} of {len(view)} bytes ({error})"
            break
        found.append(some)
    records = np.concatenate(found) if found else np.empty(0, FIELDS)
    return DecodedEvents(texts, names, records, problem)


def _decoded_block(
    view: memoryview, position: int, texts: list[str], names: list[str]
) -> tuple[int, npt.NDArray[Any]]:
    """Return the end and the records of a block; add its texts and names. Raises `ValueError`."""
    if len(view) - position < _HEADER.size:
        raise ValueError("no whole header")
    magic, checksum, n_texts, texts_nbytes, n_records, first_text = _HEADER.unpack_from(
        view, position
    )
    begin = position + _HEADER.size
    middle = begin + texts_nbytes
    end = middle + n_records * RECORD_NBYTES
    if magic != _MAGIC or end > len(view):
        raise ValueError("no whole block")
    # All but the magic and the checksum itself.
    if zlib.crc32(view[position + 8 : end]) != checksum:
        raise ValueError("the checksum differs")
    if first_text != len(texts) or n_texts > MOST_TEXTS + 2:
        raise ValueError("texts are missing")
    new = _decoded_texts(view[begin:middle], n_texts)
    records = np.frombuffer(view[middle:end], FIELDS)
    _check_texts(records, len(texts) + len(new))
    new_names = records[records["kind"] == NAME]
    n_names = len(names) + len(new_names)
    if not np.array_equal(new_names["lane"], np.arange(len(names), n_names)):
        raise ValueError("names are missing")
    if (
        len(records)
        and max(int(records[one].max()) for one in ("lane", "way", "thread")) >= n_names
    ):
        raise ValueError("a name that is not there")
    texts += new
    names += [texts[one] for one in new_names["path"].tolist()]
    return end, records[records["kind"] != NAME] if len(new_names) else records


def _decoded_texts(view: memoryview, n: int) -> list[str]:
    found: list[str] = []
    position = 0
    for _ in range(n):
        if len(view) - position < _LENGTH.size:
            raise ValueError("texts are cut off")
        (nbytes,) = _LENGTH.unpack_from(view, position)
        position += _LENGTH.size
        if nbytes > len(view) - position:
            raise ValueError("texts are cut off")
        found.append(bytes(view[position : position + nbytes]).decode(errors="replace"))
        position += nbytes
    if position != len(view):
        raise ValueError("bytes between texts and records")
    return found


def _check_texts(records: npt.NDArray[Any], n_texts: int) -> None:
    if not len(records):
        return
    # The fields `path` and `peer` of `NEEDS` are numbers of tasks.
    with_texts = records[records["kind"] != NEEDS]
    for name in ("path", "peer"):
        if len(with_texts) and int(with_texts[name].max()) >= n_texts:
            raise ValueError("a text that is not there")
    if not np.isfinite(records["start_s"]).all() or not np.isfinite(records["end_s"]).all():
        raise ValueError("a time that is no number")
