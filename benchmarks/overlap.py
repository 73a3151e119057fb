"""What it is worth that tasks go on while shuffled data is sent: two hosts, 200 MB/s between them.

A program like TPC-H's query 9 without its filter, which would leave nothing to send: lineitem is
joined with partsupp and with orders, each by a shuffle of both sides, and every joined partition is
computed with. It runs with `gpurt.shuffle.overlap` on, off, and on stock Dask, on three clusters
over the same hosts (`benchmarks.hosts`), which take turns. Every worker has one thread.

Off, a task that hands a partition in ends when its receivers have all of it. What stays side by
side even then is that a worker takes in and decodes what its peer sends while it computes itself.

The ledgers of the workers say what each run was made of, and with that how much of what could have
gone on at the same time did: (sum of parts - measured) / (sum of parts - longest part).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
from distributed import Client, Worker, wait

import dask_gpurt
from benchmarks.harness import arguments, machine, persisting_s
from benchmarks.hosts import cluster, hosts, shape
from dask_gpurt.demo.tpch_data import make_tpch
from dask_gpurt.devices.ledger import Entry, overlap

RATE, RATE_NBYTES_PER_S = "1600mbit", 200e6
#: On off's time, at most.
TARGET = 0.75
SETTINGS = {
    # The namespaces are of one machine, where memory would be shared instead.
    "gpurt.shuffle.transport": "comm",
    "dataframe.shuffle.method": "p2p",
}
SIDES: dict[str, dict[str, Any]] = {
    "on": {"gpurt.shuffle.overlap": True},
    "off": {"gpurt.shuffle.overlap": False},
    "stock": {},
}
COLUMNS = {
    "lineitem": [
        "l_orderkey",
        "l_partkey",
        "l_suppkey",
        "l_quantity",
        "l_extendedprice",
        "l_discount",
    ],
    "partsupp": ["ps_partkey", "ps_suppkey", "ps_supplycost"],
    "orders": ["o_orderkey", "o_orderdate"],
}


def profits(joined: pd.DataFrame) -> pd.DataFrame:
    """The computation of one partition: profit by supplier and year."""
    price = joined.l_extendedprice * (1 - joined.l_discount)
    profit = price - joined.ps_supplycost * joined.l_quantity
    made = pd.DataFrame(
        {"supplier": joined.l_suppkey, "year": joined.o_orderdate.dt.year, "profit": profit}
    )
    return made.groupby(["supplier", "year"], as_index=False).sum()


def query(tables: dict[str, dd.DataFrame]) -> dd.DataFrame:
    joined = tables["lineitem"].merge(
        tables["partsupp"],
        left_on=["l_partkey", "l_suppkey"],
        right_on=["ps_partkey", "ps_suppkey"],
        broadcast=False,
    )
    joined = joined.merge(
        tables["orders"], left_on="l_orderkey", right_on="o_orderkey", broadcast=False
    )
    meta = {"supplier": "int64", "year": "int32", "profit": "float64"}
    return joined.map_partitions(profits, meta=meta)


def entries_since(dask_worker: Worker, began_s: float) -> list[tuple[Any, ...]]:
    """What a worker did since, as plain values; by the clock of all processes of this machine."""
    from dask_gpurt.plugins.worker import state_of

    return [tuple(one) for one in state_of(dask_worker).ledger.entries() if one.end_s > began_s]


def processor_s(client: Client) -> float:
    """Processor time of workers, scheduler and client, since they began."""
    return time.process_time() + sum(client.run(time.process_time).values())


def run_once(client: Client, inputs: dict[str, dd.DataFrame]) -> dict[str, Any]:
    """Seconds, and what the workers' ledgers say about them."""
    used_s, began_s = processor_s(client), time.perf_counter()
    with client.as_current(), dask.config.set(SETTINGS):
        seconds = persisting_s(client, query(inputs))
    used_s = processor_s(client) - used_s
    found = [
        overlap((Entry(*one) for one in entries), seconds)
        for entries in client.run(entries_since, began_s=began_s).values()
    ]
    parts: dict[str, float] = {}
    for one in found:
        for lane, busy_s in one.parts_s.items():
            parts[lane] = parts.get(lane, 0.0) + busy_s / len(found)
    known = [one.efficiency for one in found if one.efficiency is not None]
    efficiency = statistics.mean(known) if known else None
    return {
        "seconds": seconds,
        "processor_s": used_s,
        "parts_s": parts,
        "efficiency": efficiency,
    }


def load(client: Client, directory: Any, scale: float) -> dict[str, dd.DataFrame]:
    partitions = {"lineitem": 32, "partsupp": 8, "orders": 16}
    with client.as_current():
        loaded = {
            name: dd.read_parquet(directory / name, columns=columns).repartition(
                npartitions=max(2, int(partitions[name] * min(1, scale)))
            )
            for name, columns in COLUMNS.items()
        }
        loaded = dict(zip(loaded, client.persist(list(loaded.values())), strict=True))
        wait(list(loaded.values()))
    return loaded


def median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in runs)


def report(side: str, runs: list[dict[str, Any]], off_s: float) -> None:
    seconds = median(runs, "seconds")
    text = f"{side:6} {seconds:7.3f} s  {seconds / off_s:5.2f} of off"
    text += f"  {median(runs, 'processor_s') / seconds:4.2f} cores busy"
    if side != "stock":
        lanes = sorted({lane for one in runs for lane in one["parts_s"]})
        parts = ", ".join(
            f"{lane} {statistics.median(one['parts_s'].get(lane, 0.0) for one in runs):.2f} s"
            for lane in lanes
        )
        text += f"  efficiency {median(runs, 'efficiency'):5.2f}  ({parts})"
    print(text, flush=True)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--compression", default="auto", help="gpurt.shuffle.compression")
    parser.add_argument("--rate", default=RATE, help="of each host's link, as tc takes it")
    options = parser.parse_args()
    tables = make_tpch(options.scale)
    sides: dict[str, tuple[Client, dict[str, dd.DataFrame]]] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(hosts(2))
        for side, settings in SIDES.items():
            if options.only and side not in options.only.split(","):
                continue
            client = stack.enter_context(cluster(names))
            if side != "stock":
                more = {**SETTINGS, **settings, "gpurt.shuffle.compression": options.compression}
                with dask.config.set(more):
                    dask_gpurt.enable(client)
            sides[side] = client, load(client, tables, options.scale)
            runs[side] = []
        shape(names, options.rate)
        order = list(sides)
        for side in order:
            run_once(*sides[side])
        for number in range(options.repeats):
            for side in order:
                runs[side].append(run_once(*sides[side]))
            order.reverse()
            print(f"  {number + 1}/{options.repeats}", file=sys.stderr, flush=True)
        for side in sides:
            report(side, runs[side], median(runs["off" if "off" in runs else side], "seconds"))
        for side, (client, _) in sides.items():
            if side != "stock":
                for one in dask_gpurt.status(client)["shuffles"][-4:]:
                    spent = {phase: round(s, 2) for phase, s in one["seconds"].items()}
                    share = one["wire_nbytes"] / max(one["sent_nbytes"], 1)
                    print(f"  {side}: sent {one['sent_nbytes']:,} B, {share:.0%} of it, {spent}")
        sides.clear()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "overlap": runs}, file, indent=1)


if __name__ == "__main__":
    main()
