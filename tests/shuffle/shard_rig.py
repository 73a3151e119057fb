"""Helpers for tests of the shard store: shards whose rows name their origin, and a store.

Every row is (source, slot, number within the slot). So lost, doubled or misplaced rows are visible.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading

import numpy as np

from dask_gpurt.frames.adapter import Packed
from dask_gpurt.metrics import Counters
from dask_gpurt.shuffle.budget import Budget
from dask_gpurt.shuffle.shard import Origins, Shard
from dask_gpurt.shuffle.shards import ShardStore

LAYOUT_KEY = b"source, slot, number"
ROW_NBYTES = 24
PATIENCE_S = 20.0
PLENTY = 1 << 30


class TripleFrames:
    """A minimal adapter that can pack and unpack; its frames are arrays of triples."""

    merge = None

    def pack(self, body):
        buffer = np.frombuffer(body.tobytes(), dtype=np.uint8)
        # Sections have arbitrary lengths, so that a loss of them is visible.
        return Packed(buffer, len(body), arrow_nbytes=len(body), pickle_nbytes=2 * len(body))

    def unpack(self, layout_key, packed):
        assert layout_key == LAYOUT_KEY
        body = packed.buffer.view(np.int64).reshape(-1, 3)
        assert packed.n_rows == packed.arrow_nbytes == len(body)
        assert packed.pickle_nbytes == 2 * len(body)
        return body


class MergingFrames(TripleFrames):
    """The same, and bodies can be merged."""

    n_merged = 0

    def merge(self, bodies, selections):
        self.n_merged += len(bodies)
        rows = np.concatenate(bodies)
        made = []
        for selection in selections:
            body = selection.empty(len(selection.rows) * ROW_NBYTES).view(np.int64).reshape(-1, 3)
            body[:] = rows[selection.rows]
            made.append(body)
        return made


def make_rows(source, slot, count):
    return [(source, slot, number) for number in range(count)]


def make_shard(source, first_slot, counts, number=0, count=1, attempt=1, packed=False):
    """Return a shard with `counts` rows for each of the slots from `first_slot`."""
    return make_joined_shard({source: counts}, first_slot, number, count, attempt, packed)


def make_joined_shard(counts_of, first_slot, number=0, count=1, attempt=1, packed=False):
    """Return a shard of sources that one task handed over, given the counts of each."""
    sources = sorted(counts_of)
    runs = [
        (first_slot + place, source, counts_of[source][place])
        for place in range(len(counts_of[sources[0]]))
        for source in sources
    ]
    rows = [row for slot, source, n in runs for row in make_rows(source, slot, n)]
    body = np.array(rows, dtype=np.int64).reshape(-1, 3)
    contents = {"packed": TripleFrames().pack(body)} if packed else {"body": body}
    if len(sources) > 1 and any(n for _, _, n in runs):
        arrays = np.array([run for run in runs if run[2]], dtype=np.int64).T
        contents["origins"] = Origins(*arrays, sources[0])
    return Shard(
        rows_per_slot=np.sum([counts_of[source] for source in sources], axis=0, dtype=np.uint32),
        source=sources[0],
        attempt=attempt,
        number=number,
        count=count,
        first_slot=first_slot,
        layout_key=LAYOUT_KEY,
        **contents,
    )


def read_slot(store, slot):
    pieces = store.pieces(slot)
    return [tuple(row) for piece in pieces for row in piece.body[piece.start : piece.stop].tolist()]


class WatchedBudget(Budget):
    """A budget that signals when it is empty, and records its minimum."""

    def __init__(self, limit_nbytes):
        super().__init__(limit_nbytes)
        self.emptied = threading.Event()
        self.least_nbytes = 0

    def change(self, nbytes):
        super().change(nbytes)
        self.least_nbytes = min(self.least_nbytes, self.used_nbytes)
        if not self.used_nbytes:
            self.emptied.set()


def files_of(directory):
    """Return the open files that once had a name in a directory."""
    found = {}
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            name = os.readlink(descriptor)
            if name.startswith(f"{directory}/"):
                found[name] = descriptor
    return [found[name] for name in sorted(found)]


def change(path, position, data):
    """Overwrite bytes of a file."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(position)
        file.write(data)


class Rig:
    """A store for slots 0 to 9, and all objects that a test inspects."""

    def __init__(self, root, limit_nbytes=PLENTY, **options):
        self.directory = pathlib.Path(root) / "run"
        self.budget = options.pop("budget", None) or WatchedBudget(limit_nbytes)
        self.counters = options.pop("counters", None) or Counters()
        adapter = options.pop("adapter", None) or TripleFrames()
        slots = options.pop("slots", (0, 10))
        self.store = ShardStore(
            adapter, slots, str(self.directory), self.budget, self.counters, **options
        )

    @property
    def files(self):
        """Return the open files, which have no name any more, but descriptors."""
        assert not self.directory.exists()
        return files_of(self.directory)

    def counted(self, name):
        return self.counters.snapshot()[name]


def in_thread(function, *args):
    """Run a function in a thread; return a future of its result."""
    outcome = []

    def target():
        try:
            outcome.append(function(*args))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()

    def join():
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "stuck"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return join


def spread_shards(n_shards, n_rows=2, source=0, packed=False):
    """Return shards of one source: `n_rows` rows for each of the first slots."""
    return [
        make_shard(source, slot, [n_rows], number=slot, count=n_shards, packed=packed)
        for slot in range(n_shards)
    ]
