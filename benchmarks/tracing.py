"""A shuffle with tracing off and on, in turns, on one cluster; and the bytes of an event.

The start and the end of a trace are not part of the time: no task waits for them. They are printed
apart. Bytes of an event are those of the file, and those that workers recorded.

With `--minutes`, one trace of so many minutes instead, of one shuffle after the other: its bytes.
With `--off`, no trace: shuffles in turns with and without the code that asks whether one is on.
Single shuffles differ by several percent, so this needs hundreds of repeats. `asking_s` says it
without that noise: how often a shuffle asks, by the seconds that asking takes in a loop.

    python -m benchmarks.tracing --off --workers 2 --repeats 60
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import dask.dataframe as dd
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import (
    Sides,
    arguments,
    in_turns,
    persisting_s,
    settle,
    stock_client,
    write_json,
)
from benchmarks.shuffle import numbers_part
from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.plugins.memory import manager
from dask_gpurt.plugins.shuffle import exchange_run
from dask_gpurt.plugins.tracing.ledger_hook import DiskEntries
from dask_gpurt.tracing import merge

#: Input and output partitions, and the rows of each: 32 bytes a row, 1 GB in all.
N_PARTS, ROWS = 32, 1_000_000


def frame(scale: float) -> dd.DataFrame:
    rows = int(ROWS * scale)
    return dd.from_map(numbers_part, range(N_PARTS), rows=rows, meta=numbers_part(0, 1).iloc[:0])


def persisted(client: Client, scale: float) -> dd.DataFrame:
    with client.as_current(), dask.config.set(scheduler=client.get):
        inputs = client.persist(frame(scale))
        wait(inputs)
    return inputs


def shuffle_s(client: Client, inputs: dd.DataFrame) -> float:
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return persisting_s(client, inputs.shuffle("key"))


def measure(client: Client, scale: float, repeats: int) -> dict[str, float]:
    inputs = persisted(client, scale)
    recorded: list[int] = []
    merged = merge.merged

    def counted(scheduler: Any, workers: Any, *more: Any, **options: Any) -> Any:
        recorded.append(sum(len(one.data) for one in (scheduler, *workers)))
        return merged(scheduler, workers, *more, **options)

    def once(side: str, client: Client) -> dict[str, float]:
        settle(client)
        if side == "stock":
            return {"shuffle_s": shuffle_s(client, inputs)}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json.gz")
            began_s = time.perf_counter()
            with dask_gpurt.trace(client, path) as traced:
                begin_s = time.perf_counter() - began_s
                seconds = shuffle_s(client, inputs)
                began_s = time.perf_counter()
            trace = traced.trace
            assert not any(one.n_dropped or one.ended for one in trace.processes)
            n_events = trace.n_events
            return {
                "shuffle_s": seconds,
                "begin_s": begin_s,
                "end_s": time.perf_counter() - began_s,
                "events": n_events,
                "file_nbytes_per_event": os.path.getsize(path) / n_events,
                "recorded_nbytes_per_event": recorded[-1] / n_events,
            }

    with mock.patch.object(merge, "merged", counted):
        # One cluster is both sides: "stock" without a trace, "enabled" with one.
        _, medians = in_turns(Sides(client, client), repeats, once)
    found = {name: value for (side, name), value in medians.items() if side == "enabled"}
    return {**found, "without_s": medians["stock", "shuffle_s"]}


def ask_nobody(is_so: bool, dask_worker: Any) -> None:
    """Take away a worker's code that asks whether a trace is on, or put it back."""
    asking = vars(dask_worker).setdefault("asking", {})

    def add(self: Ledger, entry: LedgerEntry) -> None:
        with self._lock:
            self._entries.append(entry)

    @contextlib.contextmanager
    def timed(self: Ledger, lane: str, path: str, nbytes: int = 0) -> Any:
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(LedgerEntry(lane, path, nbytes, start_s, self.clock()))

    def nothing(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    for owner, name, plain in (
        (Ledger, "add", add),
        (Ledger, "timed", timed),
        (DiskEntries, "timed", nothing),
        (exchange_run, "enter_phase", nothing),
        (manager, "enter_phase", nothing),
    ):
        stock = asking.setdefault((owner, name), getattr(owner, name))
        setattr(owner, name, plain if is_so else stock)


def n_asked(dask_worker: Any) -> int:
    """Return how many entries a worker's ledger got: each one asks. Parts of tasks ask, too."""
    ledger = dask_worker.extensions["gpurt"].ledger
    return sum(one.n for one in ledger.sums().values())


def asking_s(n: int = 200_000) -> float:
    """Return the seconds that the code of traces adds to one entry of a ledger."""

    def entries_s() -> float:
        ledger = Ledger()
        began_s = time.perf_counter()
        for _ in range(n):
            with ledger.timed("codec", "encode", 1):
                pass
        return time.perf_counter() - began_s

    worker = SimpleNamespace()
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        for is_plain in found:
            ask_nobody(is_plain, worker)
            found[is_plain].append(entries_s() / n)
    return statistics.median(found[False]) - statistics.median(found[True])


def off(client: Client, scale: float, repeats: int) -> dict[str, float]:
    """Return the seconds of shuffles without a trace, and of those that ask nobody for one.

    `low` and `high` are the bounds of 95 % of ratios of resampled medians.
    """
    inputs = persisted(client, scale)

    def once(side: str, client: Client) -> dict[str, float]:
        client.run(ask_nobody, side == "stock")
        settle(client)
        return {"shuffle_s": shuffle_s(client, inputs)}

    before = sum(client.run(n_asked).values())
    every, medians = in_turns(Sides(client, client), repeats, once)
    n_entries = (sum(client.run(n_asked).values()) - before) / (2 * repeats + 2)
    asked, plain = ([one["shuffle_s"] for one in every[side]] for side in ("enabled", "stock"))
    draw = random.Random(0)

    def resampled() -> float:
        pairs = [draw.randrange(len(asked)) for _ in asked]
        return statistics.median(asked[i] for i in pairs) / statistics.median(
            plain[i] for i in pairs
        )

    ratios = sorted(resampled() for _ in range(2_000))
    return {
        "without_s": medians["stock", "shuffle_s"],
        "shuffle_s": medians["enabled", "shuffle_s"],
        "ratio": medians["enabled", "shuffle_s"] / medians["stock", "shuffle_s"],
        "low": ratios[50],
        "high": ratios[-51],
        "entries": n_entries,
        "asking_s": n_entries * asking_s(),
    }


def long_trace(client: Client, scale: float, minutes: float) -> dict[str, float]:
    """Trace shuffles for some minutes. Return their number, and the bytes of the trace."""
    lazy = frame(scale)
    n_shuffles, began_s = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json.gz")
        with dask_gpurt.trace(client, path) as traced:
            while time.perf_counter() - began_s < 60 * minutes:
                shuffle_s(client, lazy)
                n_shuffles += 1
        assert not any(one.n_dropped or one.ended for one in traced.trace.processes)
        return {
            "shuffles": n_shuffles,
            "events": traced.trace.n_events,
            "file_nbytes": os.path.getsize(path),
        }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--off", action="store_true", help="compare with no code of traces")
    parser.add_argument("--minutes", type=float, help="trace shuffles for so long")
    options = parser.parse_args()
    with stock_client(options.workers) as client:
        dask_gpurt.enable(client)
        if options.off:
            found = off(client, options.scale, options.repeats)
        elif options.minutes:
            found = long_trace(client, options.scale, options.minutes)
        else:
            found = measure(client, options.scale, options.repeats)
            found["ratio"] = found["shuffle_s"] / found["without_s"]
    for name, value in found.items():
        print(f"{name:28} {value:14.6f}")
    if "begin_s" in found:
        print(f"on against off: {found['ratio']:.3f} (at most 1.03)")
    write_json(options.json, [], tracing=found)


if __name__ == "__main__":
    main()
