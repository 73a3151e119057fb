"""A shuffle between two hosts of four workers each: directly, and in two steps by relays.

Network namespaces stand for hosts (`benchmarks.hosts`). There is a cluster for each way, and they
take turns. Bytes are those of the link, with TCP's and the scheduler's. A link between two workers
counts once.

    python -m benchmarks.two_level
    python -m benchmarks.two_level --rate 800mbit
    python -m benchmarks.two_level --small --latency-ms 1

With `--small`, a partition sends 10 kB to each partition. With `--latency-ms`, a packet to the
other host takes so long. The last run kills a relay in the middle, and the result must be right.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import arguments, settle, write_json
from benchmarks.hosts import NETWORK, cluster, hosts, shape
from benchmarks.latency import slow_way
from benchmarks.shuffle import frame, numbers_part
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle.routing import host_of

WAYS = ("direct", "two-level")
#: Four numbers of eight bytes.
ROW_NBYTES = 32
#: Partitions and rows of each: 1 GB, and 10 kB for each pair of 64 partitions.
LARGE, SMALL = (32, 1_000_000), (64, 20_000)


def link_nbytes() -> int:
    """Return the bytes that have passed the first host's link, both ways."""
    folder = Path("/sys/class/net/gpurt-v1/statistics")
    return sum(int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


def links_between_hosts(client: Client) -> int:
    """Return the number of pairs of workers on different hosts that have sent to each other."""

    def peers(dask_worker: Any) -> list[str]:
        return list(runtime_of(dask_worker).links.report())

    return len(
        {
            frozenset((worker, peer))
            for worker, found in client.run(peers).items()
            for peer in found
            if host_of(peer) != host_of(worker)
        }
    )


def configure(client: Client, way: str) -> None:
    with dask.config.set({"gpurt.shuffle.routing": way}):
        dask_gpurt.enable(client)


def shuffled(inputs: Any, n_partitions: int) -> dd.DataFrame:
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return inputs.shuffle("key", npartitions=n_partitions)


def once(client: Client, inputs: Any, n_partitions: int) -> dict[str, Any]:
    before = link_nbytes()
    began = time.perf_counter()
    made = client.persist(shuffled(inputs, n_partitions))
    wait(made)
    found = {"wall_s": time.perf_counter() - began, "link_nbytes": link_nbytes() - before}
    del made
    settle(client)
    return {**found, "links": links_between_hosts(client)}


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(client: Client, n_partitions: int, n_rows: int) -> None:
    """Kill a worker in the middle of a shuffle; raise if the result is not right."""
    (made,) = frame(numbers_part, n_partitions, n_rows)
    expected = int(client.compute(made["key"].sum()).result())
    nbytes = n_partitions * n_rows * ROW_NBYTES
    inputs = client.persist(made)
    wait(inputs)
    victim = min(client.scheduler_info()["workers"])
    before = link_nbytes()
    outputs = client.persist(shuffled(inputs, n_partitions))
    # A tenth of what crosses the link: the shuffle is in full swing.
    while link_nbytes() - before < nbytes // 20:
        if all(future.done() for future in client.futures_of(outputs)):
            raise SystemExit("the shuffle ended before a relay was killed")
        time.sleep(0.001)
    with contextlib.suppress(OSError):  # it cannot answer
        client.run(_kill, workers=[victim])
    if int(client.compute(outputs["key"].sum()).result()) != expected:
        raise SystemExit("the result is wrong after a relay was killed")


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rate", help="rate of each host's link, such as 800mbit")
    parser.add_argument("--latency-ms", type=float, help="time of a packet to the other host")
    parser.add_argument("--small", action="store_true", help="10 kB for each pair of partitions")
    options = parser.parse_args()
    n_partitions, n_rows = SMALL if options.small else LARGE
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(hosts(2))
        if options.latency_ms is not None:
            ends = [(name, f"{NETWORK}.{number}") for number, name in enumerate(names, 1)]
            stack.enter_context(slow_way(ends, options.latency_ms / 1000))
        clients = {way: stack.enter_context(cluster(names, 4)) for way in WAYS}
        if options.rate:
            shape(names, options.rate)
        inputs = {}
        for way, client in clients.items():
            configure(client, way)
            with client.as_current():
                (made,) = frame(numbers_part, n_partitions, n_rows)
                inputs[way] = client.persist(made)
                wait(inputs[way])
        order = list(WAYS)
        for repeat in range(options.repeats + 1):
            for way in order:
                with clients[way].as_current():
                    run = once(clients[way], inputs[way], n_partitions)
                if repeat:  # the first runs make connections
                    runs[way].append(run)
            order.reverse()
            print(f"  {repeat}/{options.repeats}", file=sys.stderr, flush=True)
        inputs.clear()
        report(runs, has_latency=options.latency_ms is not None)
        if options.latency_ms is None:
            with clients["two-level"].as_current():
                killed(clients["two-level"], n_partitions, n_rows)
            print("with a relay killed, the result is right")
    write_json(options.json, [], runs=runs, rate=options.rate, latency_ms=options.latency_ms)


def report(runs: dict[str, list[dict[str, Any]]], *, has_latency: bool) -> None:
    median = {
        (way, what): statistics.median(run[what] for run in runs[way])
        for way in WAYS
        for what in ("wall_s", "link_nbytes", "links")
    }
    for way in WAYS:
        print(
            f"{way:10} {median[way, 'wall_s']:7.3f} s  {median[way, 'links']:3.0f} links"
            + ("" if has_latency else f"  {median[way, 'link_nbytes'] / 1e6:8.1f} MB")
        )
    for what in ("wall_s", *([] if has_latency else ["link_nbytes"])):
        print(f"{what}: {median['two-level', what] / median['direct', what]:.3f} of direct")


if __name__ == "__main__":
    main()
