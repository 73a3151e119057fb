"""Bytes that four local workers receive, and seconds, with stock placement and the runtime's.

The eight graphs are those of `dask_gpurt.simulate.examples`, with real arrays and tables. Graphs
are not optimized, so sources are tasks of their own; they stand for files or persisted data.
Shuffles are made of tasks on both sides, so that only placement differs. Sides take turns, and
ratios are those of medians. The runtime has its flag alone: workers report their machines.

    python -m benchmarks.placement --repeats 5
    python -m benchmarks.placement --scale 0.1 --repeats 1 --only "a + b"
    python -m benchmarks.placement --rate 800mbit

With `--rate`, there are two workers on each of two hosts (`benchmarks.hosts`). Each host has a link
of that rate. With `--described`, the runtime gets a description of hosts and links, too.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
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
import yaml
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import Sides, arguments, settle, two_clusters, write_json
from benchmarks.hosts import NETWORK, cluster, hosts, shape

#: Blocks along an edge of a matrix; tables have as many partitions as a matrix has blocks.
SIDE = 8
#: Highest ratios to stock that are wanted.
BYTES_TARGET, WORST_BYTES_TARGET, WALL_TARGET, SHAPED_WALL_TARGET = 0.6, 1.05, 1.0, 0.6
N_WORKERS = 4


def matrix(edge: int, seed: int, side: int = SIDE) -> Any:
    """Return a square matrix of random numbers, in square blocks."""
    length = side * edge
    return da.random.default_rng(seed).random((length, length), chunks=(edge, edge))


def part(number: int, column: str, rows: int, keys: int) -> pd.DataFrame:
    """Return a partition of a table."""
    rng = np.random.default_rng([number, len(column)])
    return pd.DataFrame({"key": rng.integers(0, keys, rows), column: rng.random(rows)})


def table(column: str, partitions: int, rows: int, keys: int) -> Any:
    """Return a table whose partitions are made by tasks."""
    make = partial(part, column=column, rows=rows, keys=keys)
    return dd.from_map(make, list(range(partitions)), meta=part(0, column, 1, keys))


def uneven_tree_sum(edge: int) -> Any:
    lengths = tuple(3 if number % 4 == 0 else 1 for number in range(SIDE**2))
    x = da.random.default_rng(1).random((sum(lengths), edge, edge), chunks=(lengths, edge, edge))
    return x.sum(axis=0, split_every=2)


def add(edge: int) -> Any:
    return matrix(edge, 1) + matrix(edge, 2)


def transpose_add(edge: int) -> Any:
    x = matrix(edge, 1)
    return x.T + x


def matmul(edge: int) -> Any:
    return matrix(edge, 1, SIDE // 2) @ matrix(edge, 2, SIDE // 2)


def merge_small(edge: int) -> Any:
    rows = edge * edge // 2
    left = table("left", SIDE**2, rows, keys=10_000)
    return left.merge(table("right", 1, 10_000, keys=10_000).drop_duplicates("key"), on="key")


def stencil(edge: int) -> Any:
    x = matrix(edge, 1)
    for _ in range(2):
        x = x.map_overlap(_same, depth=1, boundary="none")
    return x


def joins(edge: int) -> Any:
    rows, partitions = edge * edge // 2, SIDE**2 // 4
    keys = 4 * rows * partitions
    orders = table("orders", partitions, rows, keys)
    items = table("items", partitions, rows, keys)
    customers = table("customers", max(2, partitions // 4), rows, keys)
    joined = orders.merge(customers, on="key").merge(items, on="key")
    return joined.groupby("key").items.sum()


def pipeline(edge: int) -> Any:
    count = SIDE**2
    x = da.random.default_rng(1).random((count * edge, edge), chunks=(edge, edge))
    clean = x.map_blocks(_same, dtype=float)
    pairs = da.map_blocks(np.add, clean[edge:], clean[:-edge], dtype=float)
    return pairs.rechunk({0: 4 * edge}).sum(axis=1)


def _same(block: Any) -> Any:
    return block + 0


GRAPHS: dict[str, Callable[[int], Any]] = {
    "uneven tree-sum": uneven_tree_sum,
    "a + b": add,
    "x.T + x": transpose_add,
    "matmul": matmul,
    "merge with a small table": merge_small,
    "map_overlap stencil": stencil,
    "joins by task shuffles": joins,
    "3-level pipeline": pipeline,
}


def received_nbytes(client: Client) -> int:
    """Return the bytes of results that workers have received since the last call."""

    def taken(dask_worker: Any) -> int:
        # The log is bounded, so its sum may shrink from one run to the next.
        log = dask_worker.transfer_incoming_log
        total = int(sum(one["total"] for one in log))
        log.clear()
        return total

    return sum(client.run(taken).values())


def once(client: Client, make: Callable[[int], Any], edge: int) -> tuple[float, int]:
    """Compute a graph once; return its seconds, and the bytes that workers received."""
    with (
        client.as_current(),
        dask.config.set({"dataframe.shuffle.method": "tasks", "scheduler": client.get}),
    ):
        collection = make(edge)
        received_nbytes(client)
        began = time.perf_counter()
        made = client.persist(collection, optimize_graph=False)
        wait(made)
        elapsed_s = time.perf_counter() - began
        nbytes = received_nbytes(client)
        del made
        settle(client)
    return elapsed_s, nbytes


@contextlib.contextmanager
def two_hosts(rate: str, *, is_described: bool) -> Iterator[Sides]:
    """Start two clusters over the same two hosts; one has the runtime.

    Parameters
    ----------
    is_described
        Whether the runtime is told the rate.
    """
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(hosts(2))
        one, other = (stack.enter_context(cluster(names, N_WORKERS // 2)) for _ in range(2))
        shape(names, rate)
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        yaml.safe_dump(description(names, rate), file)
        file.flush()
        with dask.config.set({"gpurt.topology.file": file.name if is_described else "auto"}):
            dask_gpurt.enable(other)
        yield Sides(one, other)


def description(names: list[str], rate: str) -> dict[str, Any]:
    gbit = float(rate.removesuffix("mbit")) / 1000
    inside = {"between": ["numa0", "eth0"], "kind": "pcie", "bandwidth": "16 GB/s"}
    outside = {"between": ["*/eth0", "bridge"], "kind": "ethernet", "bandwidth": f"{gbit} Gb/s"}
    return {
        "hosts": [
            {
                "name": name,
                "addresses": [f"{NETWORK}.{number}"],
                "numa": [{"name": "numa0"}],
                "nics": [{"name": "eth0"}],
                "links": [inside],
            }
            for number, name in enumerate(names, 1)
        ],
        "switches": ["bridge"],
        "links": [outside],
    }


def main() -> None:
    parser = arguments((__doc__ or "").replace("\n", " "))
    parser.add_argument("--rate", help="rate of each host's link, such as 800mbit")
    parser.add_argument(
        "--described", action="store_true", help="describe the hosts and links of --rate in a file"
    )
    options = parser.parse_args()
    edge = max(8, int(1000 * options.scale**0.5))
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        if options.rate:
            started = two_hosts(options.rate, is_described=options.described)
        else:
            started = two_clusters(N_WORKERS)
        sides = stack.enter_context(started)
        for name, make in GRAPHS.items():
            if options.only and options.only not in name:
                continue
            seen: dict[str, list[tuple[float, int]]] = {"stock": [], "enabled": []}
            order = list(sides.both())
            for repeat in range(options.repeats + 1):
                for side, client in order:
                    run = once(client, make, edge)
                    if repeat:
                        seen[side].append(run)
                order.reverse()
                print(f"  {name}: {repeat}/{options.repeats}", file=sys.stderr, flush=True)
            row: dict[str, Any] = {"graph": name}
            for i, what in enumerate(("wall_s", "received_nbytes")):
                mine, stock = (
                    statistics.median(one[i] for one in seen[side]) for side in ("enabled", "stock")
                )
                row[what] = {side: [one[i] for one in seen[side]] for side in seen}
                # A geometric mean must not contain 0, so a run that receives nothing is 0.01.
                row[f"{what}_ratio"] = max(mine / stock, 0.01) if stock else 1.0 + mine
            rows.append(row)
            print(
                f"{name:26} received {row['received_nbytes_ratio']:5.2f} of stock's"
                f"  wall {row['wall_s_ratio']:5.2f}",
                flush=True,
            )
    wall_target = SHAPED_WALL_TARGET if options.rate else WALL_TARGET
    for what, target in (("received_nbytes", BYTES_TARGET), ("wall_s", wall_target)):
        ratios = [row[f"{what}_ratio"] for row in rows]
        print(
            f"{what}: geometric mean {statistics.geometric_mean(ratios):.3f} (at most {target:g})"
            f", worst {max(ratios):.3f}"
            + (f" (at most {WORST_BYTES_TARGET:g})" if what == "received_nbytes" else "")
        )
    write_json(options.json, [], placement=rows, edge=edge, rate=options.rate)


if __name__ == "__main__":
    main()
