"""Seconds of a program with and without `gpurt.shuffle.overlap`, on two hosts with 200 MB/s.

With the setting, tasks go on while shuffled data is sent. Without it, a task that hands in a
partition ends only when its receivers have all of it. Even then, a worker receives and decodes the
data of its peer while it computes.

The program is like TPC-H's query 9 without its filter, which would leave little data to send.
It joins lineitem with partsupp and with orders, each by a shuffle of both sides, and computes with
every joined partition. The tables are in memory first, and in files in a second part. Partitions
have a few megabytes, because the sending of one partition overlaps with work on the next.

Runs with and without overlap take turns on one cluster over two hosts (`benchmarks.hosts`). A
second cluster would take time of the processor's cores even when idle. Stock Dask runs afterwards,
on a cluster of its own. Every worker has one thread.

The workers' ledgers give the time of each part of a run. From that follows the efficiency of the
overlap: (sum of parts - measured) / (sum of parts - longest part).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
from distributed import Client, Worker, wait

import dask_gpurt
from benchmarks.harness import arguments, machine, settle
from benchmarks.hosts import cluster, hosts, shape
from dask_gpurt.demo.tpch_data import make_tpch
from dask_gpurt.devices.ledger import LedgerEntry, overlap, overlap_of_parts

#: 200 MB/s.
RATE = "1600mbit"
#: Highest time with overlap that is wanted, as a share of the time without.
TARGET = 0.75
SETTINGS = {
    # Both hosts are on one machine, so the runtime would choose shared memory.
    "gpurt.shuffle.transport": "comm",
    "dataframe.shuffle.method": "p2p",
}
OVERLAP = {"on": True, "off": False}
#: Shuffles in one run of the program.
N_SHUFFLES = 4
N_PARTITIONS = {"lineitem": 32, "partsupp": 8, "orders": 16}
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
    """Compute the profit by supplier and year in one partition."""
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
    """Return a worker's ledger entries since `began_s`, as plain values.

    All processes of this machine have the same clock, so the client's time can be compared.
    """
    from dask_gpurt.plugins.worker.worker_runtime import runtime_of

    return [tuple(one) for one in runtime_of(dask_worker).ledger.entries() if one.end_s > began_s]


def processor_s(client: Client) -> float:
    """Return the processor time of workers, scheduler and client since their start."""
    return time.process_time() + sum(client.run(time.process_time).values())


def run_once(client: Client, inputs: dict[str, dd.DataFrame]) -> dict[str, Any]:
    """Run the program once; return its seconds, and their parts by the workers' ledgers."""
    with client.as_current(), dask.config.set(SETTINGS):
        collection = query(inputs)
        used_s, began_s = processor_s(client), time.perf_counter()
        result = client.persist(collection)
        wait(result)
        seconds = time.perf_counter() - began_s
    used_s = processor_s(client) - used_s
    found = [
        overlap_of_parts(overlap(LedgerEntry(*one) for one in entries).parts_s, seconds)
        for entries in client.run(entries_since, began_s=began_s).values()
    ]
    del result
    settle(client)
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


def split(directory: Path, into: Path) -> None:
    """Write each table into files, one for each partition."""
    for name, columns in COLUMNS.items():
        table = dd.read_parquet(directory / name, columns=columns)
        table.repartition(npartitions=N_PARTITIONS[name]).to_parquet(into / name)


def read(client: Client, files: Path) -> dict[str, dd.DataFrame]:
    """Return the tables as Dask collections that are read from files."""
    with client.as_current():
        return {name: dd.read_parquet(files / name) for name in COLUMNS}


def hold(client: Client, files: Path) -> dict[str, dd.DataFrame]:
    """Return the tables, held in the memory of the workers."""
    tables = read(client, files)
    with client.as_current():
        held = dict(zip(tables, client.persist(list(tables.values())), strict=True))
        wait(list(held.values()))
    return held


def median(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in runs)


def line(side: str, runs: list[dict[str, Any]], off_s: float) -> str:
    seconds = median(runs, "seconds")
    text = f"{side:6} {seconds:7.3f} s  {seconds / off_s:5.2f} of off"
    if side == "on":
        text += f" (at most {TARGET:g})"
    text += f"  {median(runs, 'processor_s') / seconds:4.2f} cores busy"
    if side != "stock":
        lanes = sorted({lane for one in runs for lane in one["parts_s"]})
        parts = ", ".join(
            f"{lane} {statistics.median(one['parts_s'].get(lane, 0.0) for one in runs):.2f} s"
            for lane in lanes
        )
        text += f"  efficiency {median(runs, 'efficiency'):5.2f}  ({parts})"
    return text


def sent(client: Client) -> str:
    """Return a text with the bytes that the last run sent, and their share after compression."""
    shuffles = dask_gpurt.status(client)["shuffles"][-N_SHUFFLES:]
    sent_nbytes, wire_nbytes = (
        sum(one[name] for one in shuffles) for name in ("sent_nbytes", "wire_nbytes")
    )
    return f"sent {sent_nbytes:,} B, {wire_nbytes / max(sent_nbytes, 1):.0%} of it on the wire"


def in_turns(
    client: Client, inputs: dict[str, dd.DataFrame], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Run with and without overlap, in alternating order; the first run of each does not count."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in OVERLAP}
    wire = {}
    order = list(OVERLAP)
    for number in range(repeats + 1):
        for side in order:
            with dask.config.set({"gpurt.shuffle.overlap": OVERLAP[side]}):
                dask_gpurt.enable(client)
            run = run_once(client, inputs)
            wire[side] = sent(client)
            if number:
                runs[side].append(run)
        order.reverse()
        print(f"  {number}/{repeats}", file=sys.stderr, flush=True)
    off_s = median(runs["off"], "seconds")
    for side in runs:
        print(f"{line(side, runs[side], off_s)}  {wire[side]}", flush=True)
    return runs


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--compression", default="auto", help="gpurt.shuffle.compression")
    options = parser.parse_args()
    settings = {**SETTINGS, "gpurt.shuffle.compression": options.compression}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder, hosts(2) as names:
        files = Path(folder)
        split(make_tpch(options.scale), files)
        shape(names, RATE)
        for where, tables in {"in memory": hold, "in files": read}.items():
            if options.only and options.only not in where:
                continue
            print(f"tables {where}", flush=True)
            with cluster(names) as client, dask.config.set(settings):
                runs = found[where] = in_turns(client, tables(client, files), options.repeats)
            with cluster(names) as client:
                inputs = tables(client, files)
                runs["stock"] = [run_once(client, inputs) for _ in range(options.repeats + 1)][1:]
                print(line("stock", runs["stock"], median(runs["off"], "seconds")), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "rate": RATE, "overlap": found}, file, indent=1)


if __name__ == "__main__":
    main()
