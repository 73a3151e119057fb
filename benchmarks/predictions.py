"""Predictions of `dask gpurt predict` against real runs on the machines that were predicted.

Each program is traced on one cluster. The trace predicts it on others, and then it really runs
there. Tasks wait instead of computing, so that more workers than cores are as fast as on machines
of their own. Hosts are network namespaces with links of a given rate, which needs root.

    python -m benchmarks.predictions itself            # the traced cluster
    python -m benchmarks.predictions workers           # traced on 2 hosts, predicted for 4
    python -m benchmarks.predictions links             # traced at 25 MB/s, for 100 and 12.5 MB/s
    python -m benchmarks.predictions memory            # traced with 8 GB, for 1.5 GB and 1 GB

With `--compute`, tasks of `itself` compute and do not wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster

from benchmarks import hosts
from benchmarks.harness import machine
from dask_gpurt.plugins.simulation.placed_run import simulate_placed
from dask_gpurt.plugins.tracing.cluster_trace import ClusterTrace
from dask_gpurt.predict.catalogue import Catalogue
from dask_gpurt.predict.prediction import predict
from dask_gpurt.predict.recorded_program import RecordedProgram, recorded_program
from dask_gpurt.tracing import files
from dask_gpurt.tracing.events import Trace

#: Bytes per second of a waiting task: so few that two cores suffice for the rest of the work.
RATE = 50e6


def waiting(block: Any, wait: bool) -> Any:
    """Return a block after the time that its work would take."""
    if wait:
        nbytes = block.nbytes if isinstance(block, np.ndarray) else block.memory_usage().sum()
        time.sleep(nbytes / RATE)
    return block


def made(wait: bool, side: int, seed: int) -> Any:
    """Return a square array of blocks of 8 MB."""

    def make(block_info: Any = None) -> Any:
        location = block_info[None]["chunk-location"]
        block = np.random.default_rng([seed, *location]).random((1024, 1024))
        return waiting(block, wait)

    return da.map_blocks(
        make, chunks=((1024,) * side, (1024,) * side), dtype=float, meta=np.empty((0, 0))
    )


def frame(wait: bool, n: int, seed: int, n_keys: int = 100_000) -> Any:
    """Return a frame of partitions of 6 MB."""

    def make(i: int) -> pd.DataFrame:
        random = np.random.default_rng([seed, i])
        part = pd.DataFrame(
            {
                "key": random.integers(0, n_keys, 250_000),
                "a": random.random(250_000),
                "b": random.random(250_000),
            }
        )
        return waiting(part, wait)

    return dd.from_map(make, range(n), meta=make(0).iloc[:0])


def each(block: Any, wait: bool) -> Any:
    return waiting(block * 0.5 if wait else np.sqrt(np.abs(np.sin(block))), wait)


def reduction(wait: bool) -> Any:
    return made(wait, 8, 1).map_blocks(each, wait, dtype=float).sum(axis=0).sum()


def addition(wait: bool) -> Any:
    return (made(wait, 6, 1) + made(wait, 6, 2)).map_blocks(each, wait, dtype=float).sum()


def transpose(wait: bool) -> Any:
    x = made(wait, 7, 1)
    return (x + x.T).map_blocks(each, wait, dtype=float).sum()


def matmul(wait: bool) -> Any:
    x = made(wait, 5, 1)
    return x.dot(x).map_blocks(each, wait, dtype=float).sum()


def stencil(wait: bool) -> Any:
    x = made(wait, 6, 1)
    return x.map_overlap(each, wait=wait, depth=8, boundary="reflect", dtype=float).sum()


def task_shuffle(wait: bool) -> Any:
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        return frame(wait, 32, 1).shuffle("key").map_partitions(len).sum().optimize()


def shuffle(wait: bool) -> Any:
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return frame(wait, 48, 1).shuffle("key").map_partitions(len).sum().optimize()


def merge(wait: bool) -> Any:
    left, right = frame(wait, 32, 1), frame(wait, 24, 2, 2_000_000)
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        joined = left.merge(right, on="key", how="inner", shuffle_method="p2p")
        return joined.groupby("key").a_x.sum().sum().optimize()


def centred(wait: bool) -> Any:
    """Read an array that does not fit into memory twice: to find its mean, and to subtract it."""
    x = made(wait, 16, 1)
    return (x - x.mean()).sum()


PROGRAMS: dict[str, Callable[[bool], Any]] = {
    one.__name__: one
    for one in (reduction, addition, transpose, matmul, stencil, task_shuffle, shuffle, merge)
}


def trace_of(client: Client, name: str, wait: bool) -> Trace:
    """Run a program, and return its trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json.gz"
        with ClusterTrace(client, path):
            client.compute(PROGRAMS[name](wait)).result()
        return files.read(path)


def traced(client: Client, name: str, wait: bool) -> RecordedProgram:
    """Run a program with a trace, and return the trace as a program."""
    return recorded_program(trace_of(client, name, wait), name)


def warm(client: Client, name: str, wait: bool) -> None:
    """Run a program once, so that workers have its libraries."""
    client.compute(PROGRAMS[name](wait)).result()


def measured_s(client: Client, name: str, wait: bool, repeats: int) -> list[float]:
    """Return the seconds of a warm program, from its submission to its result."""
    warm(client, name, wait)
    return [traced(client, name, wait).measured_s for _ in range(repeats)]


@contextlib.contextmanager
def local(n_workers: int, memory_limit: str | int = "auto") -> Iterator[Client]:
    with (
        dask.config.set({"gpurt.enabled": True}),
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            memory_limit=memory_limit,
            dashboard_address=None,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextlib.contextmanager
def shaped(n_hosts: int, rate: str) -> Iterator[Client]:
    with dask.config.set({"gpurt.enabled": True}), hosts.hosts(n_hosts) as names:
        hosts.shape(names, rate)
        with hosts.cluster(names) as client:
            yield client


def predicted(recorded: RecordedProgram, wanted: str, text: str = "") -> tuple[float, int]:
    """Return the seconds on some machines, and the bytes spilled there."""
    catalogue = Catalogue(recorded.cluster, text, "benchmark" if text else "")
    run = partial(simulate_placed, recorded.policy)
    (row,) = predict(recorded, [wanted], catalogue, run).rows
    return row.time_s, row.spilled_nbytes


class Table:
    """Rows of predicted and measured seconds."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.spilled: list[dict[str, Any]] = []

    def add(self, program: str, case: str, predicted_s: float, measured: list[float]) -> None:
        self.rows.append(_row(program, case, "s", predicted_s, measured))
        print(_line(program, case, predicted_s, measured, "s"), flush=True)

    def add_spilled(self, program: str, case: str, nbytes: float, measured: list[float]) -> None:
        self.spilled.append(_row(program, case, "nbytes", nbytes, measured))
        in_gb = [one / 1e9 for one in measured]
        print(_line(program, f"{case}, spilled", nbytes / 1e9, in_gb, "GB"), flush=True)

    def close(self, path: str | None) -> None:
        errors = [abs(row["error"]) for row in self.rows]
        print(f"median error {statistics.median(errors):.0%}, worst {max(errors):.0%}")
        if path:
            content = {"machine": machine(), "rows": self.rows, "spilled": self.spilled}
            pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")


def _row(
    program: str, case: str, unit: str, predicted: float, measured: list[float]
) -> dict[str, Any]:
    middle = statistics.median(measured)
    return {
        "program": program,
        "case": case,
        f"predicted_{unit}": predicted,
        f"measured_{unit}": middle,
        "error": predicted / middle - 1,
    }


def _line(program: str, case: str, predicted: float, measured: list[float], unit: str) -> str:
    middle = statistics.median(measured)
    return (
        f"{program:14} {case:22} predicted {predicted:6.2f} {unit} measured {middle:6.2f} {unit}"
        f" ({min(measured):.2f}-{max(measured):.2f}) error {predicted / middle - 1:+.0%}"
    )


def itself(names: list[str], repeats: int, wait: bool, table: Table) -> None:
    with local(2) as client:
        for name in names:
            warm(client, name, wait)
            recorded = traced(client, name, wait)
            seconds, _ = predicted(recorded, "recorded")
            table.add(name, "the traced run", seconds, [recorded.measured_s])
            table.add(name, "other runs", seconds, measured_s(client, name, wait, repeats))


def recordings(client: Client, names: list[str]) -> dict[str, RecordedProgram]:
    found = {}
    for name in names:
        warm(client, name, True)
        found[name] = traced(client, name, True)
    return found


def workers(names: list[str], repeats: int, wait: bool, table: Table) -> None:
    with shaped(2, "400mbit") as client:
        recorded = recordings(client, names)
    found = {name: predicted(one, "4xrecorded")[0] for name, one in recorded.items()}
    with shaped(4, "400mbit") as client:
        for name in names:
            table.add(name, "4 hosts from 2", found[name], measured_s(client, name, True, repeats))


def links(names: list[str], repeats: int, wait: bool, table: Table) -> None:
    with shaped(4, "200mbit") as client:
        recorded = recordings(client, names)
    for rate, network in (("800mbit", "100 MB/s"), ("100mbit", "12.5 MB/s")):
        text = f"other: {{threads: 1, memory: 8 GiB, network: {network}}}"
        found = {name: predicted(one, "4xother", text)[0] for name, one in recorded.items()}
        with shaped(4, rate) as client:
            for name in names:
                table.add(name, network, found[name], measured_s(client, name, True, repeats))


def memory(names: list[str], repeats: int, wait: bool, table: Table) -> None:
    PROGRAMS[centred.__name__] = centred
    with local(2, "8GB") as client:
        recorded = recordings(client, [centred.__name__])[centred.__name__]
    for limit in ("1.5GB", "1GB"):
        with local(2, limit) as client:
            warm(client, centred.__name__, True)
            runs = [spilling(client) for _ in range(repeats)]
        rate = statistics.median(one.cluster.disk_nbytes_per_s for one, _ in runs)
        # Of what the workers of this machine have, the runtime uses the limit of each.
        text = f"small: {{threads: 2, memory: {2 * float(limit[:-2])} GB, network: 1 GB/s"
        seconds, spilled_nbytes = predicted(recorded, "small", f"{text}, disk: {rate:.0f} B/s}}")
        table.add("centred", f"{limit} a worker", seconds, [one.measured_s for one, _ in runs])
        table.add_spilled("centred", limit, spilled_nbytes, [nbytes for _, nbytes in runs])


def spilling(client: Client) -> tuple[RecordedProgram, float]:
    """Run `centred`, and return it with the bytes that went to disk."""
    trace = trace_of(client, centred.__name__, True)
    spilled = sum(work.nbytes for work in trace.work if work.path == "memory > disk")
    return recorded_program(trace, centred.__name__), spilled


SCENARIOS = {one.__name__: one for one in (itself, workers, links, memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compute", action="store_true", help="Tasks compute and do not wait.")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    table = Table()
    SCENARIOS[options.scenario](options.only, options.repeats, not options.compute, table)
    table.close(options.json)


if __name__ == "__main__":
    main()
