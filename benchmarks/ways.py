"""Seconds of a 1 GB shuffle between two workers of one host, with stock and with each transport.

Each transport has a cluster of its own, because it is chosen when the runtime is switched on. All
clusters live for the whole run, hold their input in memory, and take turns. `ucx` is left out if
`ucxx` is not installed.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from importlib.util import find_spec

import dask
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import Timing, arguments, persisting_s, stock_client, write_json
from benchmarks.shuffle import frame, numbers_part

N_PARTITIONS = 32
#: Values of `gpurt.shuffle.transport`. Others are compared with the first.
WAYS = ("comm", "ucx", "auto")


def once(client: Client, data: object) -> float:
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return persisting_s(client, data.shuffle("key"))  # type: ignore[attr-defined]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = int(1_000_000 * options.scale)
    ways = [way for way in WAYS if way != "ucx" or find_spec("ucxx") is not None]
    with contextlib.ExitStack() as stack:
        clients, inputs = {}, {}
        for way in ("stock", *ways):
            clients[way] = client = stack.enter_context(stock_client())
            if way != "stock":
                with dask.config.set({"gpurt.shuffle.transport": way}):
                    dask_gpurt.enable(client)
            with client.as_current(), dask.config.set(scheduler=client.get):
                inputs[way] = client.persist(frame(numbers_part, N_PARTITIONS, rows)[0])
                wait(inputs[way])
            once(client, inputs[way])
        taken_s: dict[str, list[float]] = {way: [] for way in clients}
        order = list(clients)
        for number in range(options.repeats):
            for way in order:
                taken_s[way].append(once(clients[way], inputs[way]))
            order.reverse()
            print(f"  {number + 1}/{options.repeats}", file=sys.stderr, flush=True)
    comm_s = statistics.median(taken_s["comm"])
    timings = []
    for way in ways:
        nbytes = N_PARTITIONS * rows * 32
        timings.append(timing := Timing(way, nbytes, taken_s["stock"], taken_s[way]))
        way_s = statistics.median(taken_s[way])
        print(f"{timing.line()}  against comm {comm_s / way_s:.2f}")
    write_json(options.json, timings)


if __name__ == "__main__":
    main()
