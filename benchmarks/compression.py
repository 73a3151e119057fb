"""A shuffle of TPC-H lineitem between two hosts, with compression `none` and `auto` in turns.

The hosts are network namespaces (`benchmarks.hosts`), with a slow link and then a fast one. One
cluster runs everything; only `gpurt.shuffle.compression` changes between runs. Shards go over
Dask's connections, and then over UCX if `ucxx` is installed. UCX uses TCP here.
"""

from __future__ import annotations

import os
import statistics
import sys
from importlib.util import find_spec
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import Timing, arguments, persisting_s, write_json
from benchmarks.hosts import cluster, hosts, shape
from dask_gpurt.demo.tpch_data import make_tpch


def compare(
    client: Client, transport: str, link: str, inputs: Any, repeats: int, target: float
) -> Timing:
    """Time both settings in turns; the result has `none` as stock and `auto` as enabled."""
    name = f"{link}, {transport}"
    timing = Timing(name, 0, target=target)

    def once(compression: str) -> float:
        settings = {
            "gpurt.shuffle.compression": compression,
            # Both hosts are on one machine, so the runtime would choose shared memory.
            "gpurt.shuffle.transport": transport,
            "dataframe.shuffle.method": "p2p",
        }
        with dask.config.set(settings), client.as_current():
            dask_gpurt.enable(client)
            return persisting_s(client, inputs.shuffle("l_partkey"))

    order = [("none", timing.stock_s), ("auto", timing.enabled_s)]
    for compression, _ in order:
        once(compression)
    for number in range(repeats):
        for compression, seconds in order:
            seconds.append(once(compression))
        order.reverse()
        print(f"  {name}: {number + 1}/{repeats}", file=sys.stderr, flush=True)
    none, auto = statistics.median(timing.stock_s), statistics.median(timing.enabled_s)
    print(
        f"{name:24} none {none:7.3f} s  auto {auto:7.3f} s  "
        f"ratio {none / auto:5.2f} (at least {target:g})"
    )
    last = dask_gpurt.status(client)["shuffles"][-2:]
    for shuffle in last:
        share = shuffle["wire_nbytes"] / max(shuffle["sent_nbytes"], 1)
        print(f"  sent {shuffle['sent_nbytes']:,} B, on the wire {share:.0%}")
    return timing


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    # UCX, too, would take both namespaces for one host and share memory.
    os.environ.setdefault("UCX_TLS", "tcp")
    ways = [way for way in ("comm", "ucx") if way != "ucx" or find_spec("ucxx") is not None]
    tables = make_tpch(0.5 * options.scale)
    timings = []
    with hosts(2) as names, cluster(names) as client:
        with client.as_current():
            lineitem = dd.read_parquet(tables / "lineitem")
            lineitem = client.persist(lineitem)
            wait(lineitem)
        for name, rate, target in [("100 MB/s", "800mbit", 1.8), ("unshaped", None, 0.97)]:
            shape(names, rate)
            for way in ways:
                if options.only and options.only not in f"{name}, {way}":
                    continue
                # A difference of 3 % needs many more runs than a factor of two: medians of
                # 21 runs differ by up to 7 % from one series to the next.
                repeats = options.repeats * (1 if rate else 8)
                timings.append(compare(client, way, name, lineitem, repeats, target))
    write_json(options.json, timings, sides={"stock_s": "none", "enabled_s": "auto"})


if __name__ == "__main__":
    main()
