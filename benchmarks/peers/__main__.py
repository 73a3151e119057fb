"""Seconds of the same two works on ours and on the engines that users would take instead.

Each engine has a process of its own, which stays warm. After one untimed round, all engines take
turns. The time includes reading the Parquet files, and excludes starting the engine. Each answer is
compared with the right one: a fast engine with a wrong answer is an error. An engine that is not
installed is skipped, with the reason.

    make .venv-peers/installed
    python -m benchmarks.peers --json benchmarks/results/peers.json
    python -m benchmarks.peers --only dask --only polars --scale 0.1 --repeats 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.peers.answers import differences
from benchmarks.peers.engines import ROOT, WORKS, Engine, chosen
from benchmarks.peers.inputs import N_PARTITIONS, prepared
from benchmarks.peers.processes import EngineProcess, FailedError


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").replace("\n", " "))
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="share of 500 MB")
    parser.add_argument(
        "--only", action="append", default=[], help="only engines with this in their name"
    )
    parser.add_argument("--json", metavar="FILE", help="write timings and versions here")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "build" / "peers", help="folder of the Parquet files"
    )
    return parser.parse_args(given)


def started(
    engines: list[Engine], folder: Path, stack: contextlib.ExitStack
) -> tuple[list[EngineProcess], dict[str, str]]:
    """Start the engines; return them, and why others are not there."""
    running, absent = [], {}
    for engine in engines:
        reason = engine.absent()
        if reason is None:
            one = EngineProcess(engine, folder, N_PARTITIONS)
            stack.callback(one.close)
            reason = one.absent
        if reason is None:
            running.append(one)
            print(f"{engine.name}: {one.about['versions']}, {one.about['settings']}", flush=True)
        else:
            absent[engine.name] = reason
            print(f"{engine.name}: skipped, {reason}", flush=True)
    return running, absent


class Rounds:
    """Seconds of each engine and work, and what went wrong."""

    def __init__(self, running: list[EngineProcess], right: dict[str, Any]) -> None:
        self._running, self._right = running, right
        self.seconds: dict[str, dict[str, list[float]]] = {
            one.engine.name: {work: [] for work in one.engine.works} for one in running
        }
        self.problems: dict[str, str] = {}

    def play(self, number: int) -> None:
        """Let each engine do each work once. Round 0 is not timed."""
        shift = number % max(len(self._running), 1)
        for work in WORKS:
            for one in [*self._running[shift:], *self._running[:shift]]:
                if one.engine.name in self.problems or work not in one.engine.works:
                    continue
                try:
                    seconds, answer = one.work(work)
                except FailedError as error:
                    self._fail(one, work, str(error))
                    continue
                if wrong := differences(answer, self._right[work]):
                    self._fail(one, work, "; ".join(wrong))
                elif number:
                    self.seconds[one.engine.name][work].append(seconds)
        print(f"  round {number} is over", file=sys.stderr, flush=True)

    def _fail(self, one: EngineProcess, work: str, problem: str) -> None:
        self.problems[one.engine.name] = f"{work}: {problem}"
        print(f"{one.engine.name}: {self.problems[one.engine.name]}", flush=True)


def table(seconds: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return a line for each engine: medians, and how many times ours they take."""
    medians = {
        name: {work: statistics.median(found) for work, found in of_engine.items() if found}
        for name, of_engine in seconds.items()
    }
    ours = medians.get("dask_gpurt", {})
    lines = []
    for name, of_engine in medians.items():
        cells = [
            f"{work} {median:7.2f} s" + (f" ({median / ours[work]:5.2f})" if work in ours else "")
            for work, median in of_engine.items()
        ]
        lines.append(f"{name:22} " + "   ".join(cells))
    return lines


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    try:
        engines = chosen(options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder, right = prepared(options.data, options.scale)
    with contextlib.ExitStack() as stack:
        running, absent = started(engines, folder, stack)
        rounds = Rounds(running, right)
        for number in range(options.repeats + 1):
            rounds.play(number)
        about = {one.engine.name: one.about for one in running}
    print("\n".join(table(rounds.seconds)))
    if options.json:
        found = {"machine": machine(), "scale": options.scale, "engines": about}
        found |= {"seconds": rounds.seconds, "skipped": absent, "failed": rounds.problems}
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 1 if rounds.problems else 0


if __name__ == "__main__":
    sys.exit(main())
