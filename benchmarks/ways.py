"""A 1 GB shuffle between two workers of one host, each way that shards can take in turn with stock.

Each way has a cluster of its own, as it is chosen when the runtime comes; all of them live, and
hold their input, for the whole run. `ucx` is left out where `ucxx` is not installed.
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
#: Besides stock; what others are compared with is first.
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
