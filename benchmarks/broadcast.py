"""A value that a program copies to all workers: seconds, bytes, and whether the copies stay.

Network namespaces stand for hosts (`benchmarks.hosts`), and the bytes are those of their links. Two
clusters on the same hosts take turns. One of them has the runtime.

    python -m benchmarks.broadcast
    python -m benchmarks.broadcast --hosts 2 --workers-each 4
    python -m benchmarks.broadcast --how replicate --rate 8gbit
    python -m benchmarks.broadcast --how tasks

With `--how tasks`, nobody asks for copies: one task on each worker needs the value.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import Sides, arguments, in_turns, settle, write_json
from benchmarks.hosts import cluster, hosts, shape

#: Bytes of the value at full scale.
NBYTES = 200_000_000
#: How long copies are watched: stock Dask removes them every two seconds.
WATCHED_S = 10.0


def received_nbytes(n_hosts: int) -> list[int]:
    """Return the bytes that each host has received over its link."""
    # The bridge's end of a host's link: it sends what the host receives.
    paths = [Path(f"/sys/class/net/gpurt-v{number + 1}/statistics") for number in range(n_hosts)]
    return [int((path / "tx_bytes").read_text()) for path in paths]


def once(client: Client, how: str, nbytes: int, n_hosts: int) -> dict[str, Any]:
    """Bring a value to all workers; return the seconds and the bytes of the busiest link."""
    value = np.random.default_rng(1).bytes(nbytes)
    before = received_nbytes(n_hosts)
    began = time.perf_counter()
    if how == "scatter":
        future = client.scatter(np.frombuffer(value, np.uint8), broadcast=True, hash=False)
    elif how == "tasks":
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        future = client.submit(np.zeros, nbytes, np.uint8, workers=workers[:1], pure=False)
        wait([client.submit(len, future, workers=[one], pure=False) for one in workers])
    else:
        future = client.submit(np.zeros, nbytes, np.uint8, pure=False)
        wait(future)
        before = received_nbytes(n_hosts)
        began = time.perf_counter()
        client.replicate(future)
    wall_s = time.perf_counter() - began
    after = received_nbytes(n_hosts)
    n_holders = len(client.who_has(future)[future.key])
    del future
    settle(client)
    busiest = max(b - a for a, b in zip(before, after, strict=True))
    return {"wall_s": wall_s, "link_nbytes": busiest, "holders": n_holders}


def kept(client: Client, nbytes: int) -> int:
    """Return the number of copies some seconds after they were made."""
    future = client.scatter(np.zeros(nbytes, np.uint8), broadcast=True, hash=False)
    time.sleep(WATCHED_S)
    return len(client.who_has(future)[future.key])


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers-each", type=int, default=1)
    parser.add_argument("--rate", default="1600mbit", help="rate of each host's link")
    parser.add_argument("--how", choices=["scatter", "replicate", "tasks"], default="scatter")
    options = parser.parse_args()
    nbytes = int(NBYTES * options.scale)
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(hosts(options.hosts))
        one, other = (stack.enter_context(cluster(names, options.workers_each)) for _ in range(2))
        dask_gpurt.enable(other)
        shape(names, options.rate)
        sides = Sides(one, other)

        def turn(_: str, client: Client) -> dict[str, Any]:
            with client.as_current():
                return once(client, options.how, nbytes, options.hosts)

        runs, median = in_turns(sides, options.repeats, turn)
        stays = {side: kept(client, nbytes) for side, client in sides.both()}
    for side in runs:
        print(
            f"{side:8} {median[side, 'wall_s']:7.3f} s"
            f"  {median[side, 'link_nbytes'] / nbytes:5.2f} values into the busiest host"
            f"  on {median[side, 'holders']:.0f} workers, {WATCHED_S:.0f} s later on {stays[side]}"
        )
    print(f"ratio {median['enabled', 'wall_s'] / median['stock', 'wall_s']:.2f}")
    write_json(options.json, [], runs=runs, stays=stays, nbytes=nbytes, rate=options.rate)


if __name__ == "__main__":
    main()
