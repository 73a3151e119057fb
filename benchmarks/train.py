"""Training in one function on all workers: seconds of a step, and of an all-reduce.

    python -m benchmarks.train steps        200 steps of logistic regression, against `compute()`
    python -m benchmarks.train latency      64 KiB among 8 ranks, 2 ms a message: ring, two-shot
    python -m benchmarks.train bandwidth    64 MiB among 4 hosts at 200 MB/s, against the bound

In `steps`, a communicator and one `compute()` a step take turns on one cluster, with the same data.
In `latency`, ranks are threads of one process, whose messages are held back for 2 ms before they
are sent. In `bandwidth`, network namespaces stand for hosts (`benchmarks.hosts`); needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import dask_gpurt
from benchmarks.harness import arguments, stock_client, write_json
from benchmarks.hosts import cluster, hosts, shape
from dask_gpurt.collectives import Communicator
from dask_gpurt.collectives.choice import RankGroup
from dask_gpurt.plugins.collectives.groups.group_member import GroupMember

N_STEPS = 200
N_ROWS, N_COLUMNS = 100_000, 20
N_HOSTS = 4
#: Bytes a second of each host's link in `bandwidth`, and the same for `tc`.
LINK_RATE, TC_RATE = 200e6, "1600mbit"
BANDWIDTH_NBYTES = 64 << 20
N_RANKS = 8
DELAY_S = 2e-3
LATENCY_NBYTES = 64 << 10
#: All-reduces in a row that are timed together.
N_IN_A_ROW = 20


def gradient(x: Any, y: Any, w: Any) -> Any:
    return x.T @ (1 / (1 + np.exp(-(x @ w))) - y)


def descend(comm: Any, blocks: list[Any], n_steps: int) -> Any:
    """Logistic regression on the blocks of each rank."""
    w = np.zeros(N_COLUMNS)
    for _ in range(n_steps):
        parts = (gradient(x, y, w) for x, y in blocks)
        w -= comm.allreduce(sum(parts, start=np.zeros(N_COLUMNS))) / N_ROWS
    return w


def with_compute(x: Any, y: Any, n_steps: int) -> Any:
    """The same with a round trip through the scheduler for each step."""
    w = np.zeros(N_COLUMNS)
    for _ in range(n_steps):
        w -= gradient(x, y, w).compute() / N_ROWS
    return w


def steps(repeats: int, scale: float) -> dict[str, list[float]]:
    n_steps = max(1, int(N_STEPS * scale))
    found: dict[str, list[float]] = {"compute": [], "run": []}
    with stock_client() as client, client.as_current():
        dask_gpurt.enable(client)
        x = da.random.default_rng(0).normal(size=(N_ROWS, N_COLUMNS), chunks=(N_ROWS // 4, -1))
        y = (x @ np.arange(N_COLUMNS) > 0).astype(float)
        x, y = client.persist([x, y])
        wait([x, y])
        models = {}

        def run() -> Any:
            with Communicator(client) as comm:
                return client.gather(comm.run(descend, (x, y), n_steps))[0]

        ways: list[tuple[str, Callable[[], Any]]] = [
            ("compute", lambda: with_compute(x, y, n_steps)),
            ("run", run),
        ]
        for repeat in range(repeats + 1):
            for name, way in ways:
                began = time.perf_counter()
                models[name] = way()
                if repeat:
                    found[name].append(time.perf_counter() - began)
            ways.reverse()
        np.testing.assert_allclose(models["run"], models["compute"], rtol=1e-6)
    one, other = (statistics.median(found[name]) for name in ("run", "compute"))
    print(f"{n_steps} steps: compute() {other:.3f} s, run {one:.3f} s, ratio {one / other:.3f}")
    return found


def all_reduces(comm: Any, _: Any, nbytes: int, n: int) -> list[float]:
    """Return the seconds of each all-reduce."""
    array, seconds = np.ones(nbytes // 8), []
    for _ in range(n):
        comm.barrier()
        began = time.perf_counter()
        total = comm.allreduce(array)
        seconds.append(time.perf_counter() - began)
        assert (total == comm.size).all()
    return seconds


@contextlib.contextmanager
def forced(algorithm: str) -> Iterator[None]:
    """Let an algorithm be the cheapest one, in this process."""
    compare = RankGroup.all_reduce

    def first(group: RankGroup, nbytes: int, costs: Any) -> Any:
        return sorted(compare(group, nbytes, costs), key=lambda one: one.algorithm != algorithm)

    RankGroup.all_reduce = first  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        RankGroup.all_reduce = compare  # type: ignore[method-assign]


@contextlib.contextmanager
def late_messages(seconds: float) -> Iterator[None]:
    """Hold each message back before it is sent, in this process."""
    deliver = GroupMember.deliver

    async def late(member: GroupMember, peer: int, compose: Any) -> None:
        await asyncio.sleep(seconds)
        await deliver(member, peer, compose)

    GroupMember.deliver = late  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GroupMember.deliver = deliver  # type: ignore[method-assign]


def latency(repeats: int, scale: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"ring": [], "two-shot": []}
    with (
        LocalCluster(
            n_workers=N_RANKS, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as made,
        Client(made, set_as_default=False) as client,
        late_messages(DELAY_S),
        Communicator(client_with_runtime(client)) as comm,
    ):
        for repeat in range(repeats + 1):
            for name, seconds in found.items():
                with forced(name):
                    runs = client.gather(
                        comm.run(all_reduces, None, int(LATENCY_NBYTES * scale), N_IN_A_ROW)
                    )
                if repeat:
                    seconds.append(statistics.median(np.max(runs, axis=0)))
    ring, two = (statistics.median(found[name]) for name in ("ring", "two-shot"))
    print(f"ring {1e3 * ring:.1f} ms, two-shot {1e3 * two:.1f} ms, ratio {ring / two:.2f}")
    return found


def client_with_runtime(client: Client) -> Client:
    dask_gpurt.enable(client)
    return client


def bandwidth(repeats: int, scale: float) -> dict[str, list[float]]:
    nbytes = int(BANDWIDTH_NBYTES * scale)
    bound = 2 * (N_HOSTS - 1) / N_HOSTS * nbytes / LINK_RATE
    with hosts(N_HOSTS) as names, cluster(names) as client:
        dask_gpurt.enable(client)
        shape(names, TC_RATE)
        with Communicator(client) as comm:
            runs = client.gather(comm.run(all_reduces, None, nbytes, repeats + 1))
        chosen = dask_gpurt.status(client)["collectives"]["algorithms"]
    found = list(np.max(runs, axis=0)[1:])
    took = statistics.median(found)
    print(f"{chosen}: {took:.3f} s, bound {bound:.3f} s, ratio {took / bound:.2f}")
    return {"seconds": found, "bound": [bound]}


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=["steps", "latency", "bandwidth"])
    options = parser.parse_args()
    section = {"steps": steps, "latency": latency, "bandwidth": bandwidth}[options.what]
    found = section(options.repeats, options.scale)
    write_json(options.json, [], **{options.what: found})


if __name__ == "__main__":
    main()
