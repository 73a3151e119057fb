"""Compression on a slow link: TPC-H lineitem shuffled between two hosts, `none` against `auto`.

The hosts are network namespaces (`benchmarks.hosts`). The same cluster runs everything:
`gpurt.shuffle.compression` is changed between runs, which take turns.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import Timing, arguments, persisting_s, write_json
from benchmarks.hosts import cluster, hosts, shape
from dask_gpurt.demo.tpch_data import make_tpch


def compare(client: Client, name: str, inputs: Any, repeats: int, target: float | None) -> Timing:
    """`none` in the place of stock, `auto` in that of the runtime."""
    timing = Timing(name, 0, target=target)

    def once(compression: str) -> float:
        settings = {
            "gpurt.shuffle.compression": compression,
            # The namespaces are of one machine, where memory would be shared instead.
            "gpurt.shuffle.transport": "comm",
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
    wanted = f" (at least {target:g})" if target else ""
    print(f"{name:24} none {none:7.3f} s  auto {auto:7.3f} s  ratio {none / auto:5.2f}{wanted}")
    last = dask_gpurt.status(client)["shuffles"][-2:]
    for shuffle in last:
        share = shuffle["wire_nbytes"] / max(shuffle["sent_nbytes"], 1)
        print(f"  sent {shuffle['sent_nbytes']:,} B, on the wire {share:.0%}")
    return timing


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    tables = make_tpch(0.5 * options.scale)
    timings = []
    with hosts(2) as names, cluster(names) as client:
        with client.as_current():
            lineitem = dd.read_parquet(tables / "lineitem")
            lineitem = client.persist(lineitem)
            wait(lineitem)
        for name, rate, target in [("100 MB/s", "800mbit", 1.8), ("unshaped", None, 0.97)]:
            if options.only and options.only not in name:
                continue
            shape(names, rate)
            timings.append(compare(client, name, lineitem, options.repeats, target))
    write_json(options.json, timings, sides={"stock_s": "none", "enabled_s": "auto"})


if __name__ == "__main__":
    main()
