"""Seconds of each step of a shuffle task that sends one partition of numbers, in one process.

Several partitions, and several memories for shards, take turns, so that caches are as cold as in a
real task. Rows are gathered in two ways in turns: as in a shuffle, and then with neither columns
read ahead nor blocks of rows.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np

from benchmarks.harness import arguments, machine
from benchmarks.shuffle import numbers_part
from dask_gpurt.devices.host_memory.malloc import PageKeeper
from dask_gpurt.frames import gather
from dask_gpurt.frames.adapter import Empty, Selection
from dask_gpurt.frames.numbering import partition_numbers
from dask_gpurt.frames.pandas_ import PandasFrames
from dask_gpurt.shuffle.plan import ExchangePlan, cut_shards

#: Rows of a partition, and output partitions.
CASES = [(1_000_000, 8), (1_000_000, 32), (1_000_000, 128), (1_000_000, 512), (4_000_000, 32)]
#: Rows of all partitions that take turns. With 32 bytes each, they are larger than any cache.
ROWS_IN_TURN = 8_000_000


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Gather columns without reading them ahead, and without blocks of rows."""
    with (
        mock.patch.object(gather, "_READ_AHEAD_ROWS", range(0)),
        mock.patch.object(gather, "BLOCK_ROWS", 1 << 62),
    ):
        yield


class ShardMemory:
    """Memory for the shards of one partition, which is reused."""

    def __init__(self) -> None:
        self._buffers: dict[int, np.ndarray] = {}

    def for_slot(self, first_slot: int) -> Empty:
        def empty(nbytes: int) -> np.ndarray:
            buffer = self._buffers.get(first_slot)
            if buffer is None or buffer.nbytes < nbytes:
                buffer = self._buffers[first_slot] = np.ones(int(1.2 * nbytes), np.uint8)
            return buffer[:nbytes]

        return empty


def measure(rows: int, n_outputs: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of each step."""
    plan = ExchangePlan({number: "ab"[number % 2] for number in range(n_outputs)})
    frames = [numbers_part(seed, rows) for seed in range(max(2, ROWS_IN_TURN // rows))]
    memory = [ShardMemory() for _ in frames]
    meta = frames[0].iloc[:0].assign(_partitions=np.array([], np.int64))
    adapter = PandasFrames(meta, "_partitions", drop_column=True)
    taken_s: dict[str, list[float]] = {}

    def once(number: int, how: str) -> None:
        frame = frames[number % len(frames)]
        marks = [time.perf_counter()]
        numbers = partition_numbers([frame["key"].to_numpy()], n_outputs)
        marks.append(time.perf_counter())
        opened = adapter.open(frame.assign(_partitions=numbers))
        grouped = opened.group(plan)
        marks.append(time.perf_counter())
        order, before = map(np.asarray, grouped)
        selections = []
        for first, end in plan.slots_of_worker.values():
            for a, b in cut_shards(before[first : end + 1], opened.row_nbytes):
                a, b = first + a, first + b
                empty = memory[number % len(memory)].for_slot(a)
                mine = order[before[a] : before[b]]
                selections.append(Selection(mine, False, empty, ascending=b - a == 1))
        began_s = time.perf_counter()
        opened.gather(selections)
        gather_s = time.perf_counter() - began_s
        taken_s.setdefault("number", []).append(marks[1] - marks[0])
        taken_s.setdefault("group", []).append(marks[2] - marks[1])
        taken_s.setdefault(how, []).append(gather_s)

    for number in range(len(frames)):
        once(number, "unused")
    taken_s.clear()
    for number in range(repeats * len(frames)):
        # The ways use different partitions, so that neither finds the other's data in a cache.
        once(2 * number, "gather")
        with plainly():
            once(2 * number + 1, "gather plainly")
    return {name: statistics.median(seconds) for name, seconds in taken_s.items()}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    # A worker that shuffles keeps freed pages, so that temporaries are not mapped each time.
    PageKeeper(1 << 30).acquire()
    found = []
    for rows, n_outputs in CASES:
        steps = measure(int(rows * options.scale), n_outputs, options.repeats)
        found.append({"rows": rows, "outputs": n_outputs, **steps})
        parts = "  ".join(f"{name} {1e3 * seconds:6.2f} ms" for name, seconds in steps.items())
        ratio = steps["gather plainly"] / steps["gather"]
        print(f"{rows:9,} rows to {n_outputs:3}  {parts}  ratio {ratio:.2f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "steps_s": found}, file, indent=1)


if __name__ == "__main__":
    main()
