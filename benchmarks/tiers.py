"""Disk traffic, seconds and peak memory with data larger than memory, on two workers of 1 GB.

Every run has a process and a cluster of its own. Processes tend to keep memory that they once had,
and a separate process can be killed if it hangs. Stock and enabled take turns, with a rest before
each run. After a run, a virtual machine may return freed memory to its host for a minute; this can
stop all cores for up to 0.3 s every two seconds.

A run that fails or does not finish is a result too: stock Dask loses workers in some cases. Reads
often come from the page cache. So bytes say more than seconds, if the machine has much more memory
than the workers may use.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import arguments, flagged_client, write_json
from benchmarks.shuffle import frame, numbers_part
from benchmarks.vitals import begin, restarts, total, vitals

LIMIT_NBYTES = 1_000_000_000
#: Counts of bytes read and written: by the store, by the process, and by the runtime's shuffles.
COUNTED = ("spill", "file", "shard")
#: Seconds beyond its deadline that a run may take to start, report and clean up.
_GRACE_S = 90.0


class Clock:
    """A deadline, and the time that is left until it."""

    def __init__(self, deadline_s: float) -> None:
        self._end = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        return max(0.001, self._end - time.monotonic())


@dataclass(frozen=True)
class Case:
    """A workload: `make` prepares inputs, and `run` is measured.

    `run` returns numbers that have to be the same on both sides.
    """

    name: str
    run: Callable[[Client, Any, Clock], list[float]]
    make: Callable[[Client, float, Clock], Any] = lambda client, scale, clock: scale


def held(client: Client, collection: Any, clock: Clock) -> Any:
    collection = client.persist(collection)
    wait(collection, timeout=clock.left_s)
    return collection


def answer(client: Client, collection: Any, clock: Clock) -> Any:
    return client.compute(collection).result(timeout=clock.left_s)


def numbers(n_chunks: int, elements: int = 5_000_000) -> Any:
    """Return an array of random numbers in chunks of 40 MB."""
    return da.random.default_rng(7).random(n_chunks * elements, chunks=elements)


def scanned(client: Client, scale: float, clock: Clock) -> Any:
    return held(client, numbers(max(4, round(60 * scale))), clock)


def scan(passes: int) -> Callable[[Client, Any, Clock], list[float]]:
    return lambda client, x, clock: [answer(client, x.sum(), clock) for _ in range(passes)]


def dot(client: Client, scale: float, clock: Clock) -> list[float]:
    side = max(2, round(10 * scale**0.5)) * 1000
    a = da.random.default_rng(7).random((side, side), chunks=1000)
    product = held(client, da.dot(a, a.T), clock)
    return [answer(client, product.sum(), clock), answer(client, product[-1, 0], clock)]


def shuffle(n_parts: int, n_rows: int) -> Callable[[Client, float, Clock], list[float]]:
    def run(client: Client, scale: float, clock: Clock) -> list[float]:
        (made,) = frame(numbers_part, max(4, round(n_parts * scale)), n_rows)
        return [int(n) for n in answer(client, made.shuffle("key").map_partitions(len), clock)]

    return run


def merged_part(seed: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    columns = {name: rng.random(rows) for name in "abcde"}
    return pd.DataFrame({"key": rng.integers(0, 1 << 25, rows), **columns})


def right_part(seed: int, rows: int) -> pd.DataFrame:
    return merged_part(seed + 1_000_000, rows)


def merge(client: Client, scale: float, clock: Clock) -> list[float]:
    n_parts = max(4, round(48 * scale))
    (left,), (right,) = (frame(part, n_parts, 650_000) for part in (merged_part, right_part))
    joined = left.merge(right, on="key", broadcast=False)
    return [int(n) for n in answer(client, joined.map_partitions(len), clock)]


def climate(client: Client, scale: float, clock: Clock) -> Any:
    steps = max(4, round(200 * scale)) * 100
    return held(client, da.random.default_rng(7).random((steps, 50_000), chunks=(100, -1)), clock)


def anomaly(client: Client, x: Any, clock: Clock) -> list[float]:
    scores = (x - x.mean(0)) / x.std(0)
    return [answer(client, (scores**2).sum(), clock), answer(client, scores[-1, 0], clock)]


def small(client: Client, scale: float, clock: Clock) -> Any:
    return held(client, numbers(8).reshape(-1, 50_000), clock)


def fits(client: Client, x: Any, clock: Clock) -> list[float]:
    return [*scan(8)(client, x, clock), *anomaly(client, x, clock)]


CASES = [
    Case("4 passes over 2.4 GB held", scan(4), scanned),
    Case("dot(a, a.T) of 10,000 x 10,000", dot),
    Case("shuffle of 3 GB made on the way", shuffle(96, 1_000_000)),
    Case("the same in 600 partitions", shuffle(600, 160_000)),
    Case("merge of 3 GB made on the way", merge),
    Case("anomaly of 8 GB held", anomaly, climate),
    Case("fits in memory", fits, small),
]


def run_here(case: Case, enabled: bool, scale: float, deadline_s: float) -> dict[str, Any]:
    """Run a case once in this process, which should exit afterwards."""
    with (
        dask.config.set({"dataframe.shuffle.method": "p2p"}),
        flagged_client(False, LIMIT_NBYTES) as client,
    ):
        if enabled:
            dask_gpurt.enable(client)
        # Small computations load the code, whose loading is not to be measured.
        frame(numbers_part, 2, 1000)[0].shuffle("key").n.sum().compute()
        numbers(2, 1000).sum().compute()
        pids = begin(client)
        clock = Clock(deadline_s)
        report: dict[str, Any] = {"outcome": "finished"}
        began = time.perf_counter()
        before = vitals(client)
        try:
            inputs = case.make(client, scale, clock)
            before = vitals(client)
            began = time.perf_counter()
            report["result"] = case.run(client, inputs, clock)
        except TimeoutError:
            report["outcome"] = f"did not finish in {deadline_s:.0f} s"
        except Exception as error:
            # Workers that run out of memory cause many kinds of errors; each is a result.
            report["outcome"] = f"failed with {type(error).__name__}"
        report["wall_s"] = time.perf_counter() - began
        after = vitals(client)
        for field in (f"{what}_{how}" for what in COUNTED for how in ("read", "written")):
            # The counts of a worker that was restarted are lost.
            known = {worker: before[worker] for worker in after if worker in before}
            made = total(known, f"{field}_nbytes")
            report[f"{field}_nbytes"] = total(after, f"{field}_nbytes") - made
            report[f"{field}_before_nbytes"] = made
        report["peak_nbytes"] = max((one.peak_nbytes for one in after.values()), default=None)
        gaps = [one.longest_gap for one in after.values()]
        report["longest_gap"] = max(gaps)._asdict() if gaps else None
        report["workers"] = restarts(client, pids)
        return report


def run_apart(case: Case, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case once in a new process; if it hangs, kill it and all of its workers."""
    os.sync()
    time.sleep(options.rest)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "report.json")
        command = [sys.executable, "-m", "benchmarks.tiers", "--child", side, path]
        command += ["--only", case.name, "--scale", str(options.scale)]
        command += ["--deadline", str(options.deadline)]
        environment = {**os.environ, "DASK_TEMPORARY_DIRECTORY": folder}
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            child.wait(options.deadline + _GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
        if not os.path.exists(path):
            return {"outcome": f"hung or died, ended after {options.deadline + _GRACE_S:.0f} s"}
        with open(path) as file:
            return dict(json.load(file))


def same(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=1e-9) for a, b in zip(one, other, strict=True)
    )


def median(runs: list[dict[str, Any]], *fields: str) -> float:
    """Return the median of the sum of these fields over finished runs; NaN if there is none."""
    done = [sum(run[f] for f in fields) for run in runs if run["outcome"] == "finished"]
    return statistics.median(done) if done else math.nan


def longest_gap(runs: list[dict[str, Any]]) -> dict[str, float] | None:
    gaps: list[dict[str, float]] = [run["longest_gap"] for run in runs]
    return max(gaps, key=lambda gap: gap["seconds"], default=None)


def told(gap: dict[str, float] | None) -> str:
    """Describe a gap: its length, and the time that the loop's thread ran or had no core."""
    if gap is None:
        return "unknown"
    ran, no_core = gap["ran_s"] * 1e3, gap["no_core_s"] * 1e3
    return f"{gap['seconds'] * 1e3:4.0f} ms ({ran:.0f} run, {no_core:.0f} no core)"


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return a few figures of both sides of a case; ratios are the runtime's to stock's."""
    figures: dict[str, Any] = {}
    for side, of_side in runs.items():
        reported = [run for run in of_side if run.get("peak_nbytes") is not None]
        figures[side] = {
            "outcomes": sorted({run["outcome"] for run in of_side}),
            "wall_s": median(of_side, "wall_s"),
            "spill_nbytes": median(of_side, "spill_read_nbytes", "spill_written_nbytes"),
            "file_nbytes": median(of_side, "file_read_nbytes", "file_written_nbytes"),
            "peak_of_limit": max((r["peak_nbytes"] for r in reported), default=math.nan)
            / LIMIT_NBYTES,
            "longest_gap": longest_gap(reported),
            "workers_lost": sum(r["workers"]["lost"] for r in reported),
        }
    for field in ("wall_s", "spill_nbytes", "file_nbytes"):
        stock, enabled = figures["stock"][field], figures["enabled"][field]
        figures[f"{field.rpartition('_')[0]}_ratio"] = enabled / stock if stock else math.nan
    stock, enabled = ([r["result"] for r in of_side if "result" in r] for of_side in runs.values())
    figures["results"] = "not compared"
    if stock and enabled:
        equal = all(same(stock[0], one) for one in stock + enabled)
        figures["results"] = "equal" if equal else "DIFFER"
    return figures


def table(name: str, figures: dict[str, Any]) -> str:
    lines = [name]
    for side, label in (("stock", "stock"), ("enabled", "gpurt")):
        found = figures[side]
        lines.append(
            f"  {label:6} {found['wall_s']:7.1f} s"
            f"  spilled and read back {found['spill_nbytes'] / 1e9:6.2f} GB"
            f"  files {found['file_nbytes'] / 1e9:6.2f} GB"
            f"  peak {found['peak_of_limit']:5.2f} of limit"
            f"  longest gap {told(found['longest_gap'])}"
            f"  workers lost {found['workers_lost']}  {', '.join(found['outcomes'])}"
        )
    lines.append(
        f"  ratio  {figures['wall_ratio']:7.2f}    spilled and read back"
        f" {figures['spill_ratio']:6.2f}     files {figures['file_ratio']:6.2f}"
        f"     results {figures['results']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=3)
    parser.add_argument("--deadline", type=float, default=300.0, help="most seconds of a run")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds before each run")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [case for case in CASES if not options.only or options.only in case.name]
    if options.child:
        side, path = options.child
        report = run_here(cases[0], side == "enabled", options.scale, options.deadline)
        with open(path, "w") as file:
            json.dump(report, file)
        return
    reports = {}
    for case in cases:
        runs: dict[str, list[dict[str, Any]]] = {"stock": [], "enabled": []}
        for number in range(options.repeats):
            for side in ("stock", "enabled") if number % 2 == 0 else ("enabled", "stock"):
                runs[side].append(run_apart(case, side, options))
            print(f"  {case.name}: {number + 1}/{options.repeats}", file=sys.stderr, flush=True)
        figures = summary(runs)
        print(table(case.name, figures), flush=True)
        reports[case.name] = {**figures, "runs": runs}
    # A figure without a finished run is NaN, which JSON does not have.
    valid = json.loads(json.dumps(reports), parse_constant=lambda _: None)
    write_json(options.json, [], limit_nbytes=LIMIT_NBYTES, cases=valid)


if __name__ == "__main__":
    main()
