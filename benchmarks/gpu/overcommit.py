"""Section that computes with more CuPy arrays than fit into the GPU memory of their workers.

Each worker's CuPy pool has a limit. The arrays are kept, and take twice the limits of all workers
together. Stock Dask runs the same program.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.exchange import block
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import why_skipped

N_WORKERS = 2
POOL_NBYTES = 3 << 30
ROWS, COLUMNS, N_CHUNKS = 2_048, 8_192, 96
#: Passes over all arrays.
PASSES = 2


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_skipped("distributed")


def limit_pool(nbytes: int) -> None:
    """Let CuPy allocate at most as much, in the process of a worker."""
    import cupy

    cupy.get_default_memory_pool().set_limit(size=nbytes)


def run(report: Report) -> None:
    """Run the program on a stock cluster and on an enabled one."""
    import dask
    from distributed import Client, LocalCluster

    import dask_gpurt

    nbytes = N_CHUNKS * ROWS * COLUMNS * 8
    for side in ("enabled", "stock"):
        with (
            dask.config.set({"gpurt.enabled": False}),
            LocalCluster(n_workers=N_WORKERS, threads_per_worker=1, dashboard_address=":0") as one,
            Client(one, set_as_default=False) as client,
        ):
            if side == "enabled":
                dask_gpurt.enable(client)
            client.run(limit_pool, POOL_NBYTES)
            try:
                took_s, means = program(client)
            except Exception as error:
                # Stock Dask has nothing that frees GPU memory.
                report(Row(f"twice the memory, {side}", skipped=repr(error)[:300]))
                continue
            workers = dask_gpurt.status(client)["workers"].values() if side == "enabled" else ()
            report(
                Row(
                    f"twice the memory, {side}",
                    sum(took_s.values()),
                    "s",
                    nbytes / (N_WORKERS * POOL_NBYTES),
                    "bytes of arrays / bytes of the pools",
                    details={
                        "nbytes": nbytes,
                        "means": means,
                        "took_s": took_s,
                        "stores": [worker["memory"] for worker in workers],
                    },
                )
            )


def program(client: Any) -> tuple[dict[str, float], list[float]]:
    """Keep arrays, and compute the mean of their squares, once for each pass.

    Returns
    -------
    took_s, means
        Seconds of each part, and the means.
    """
    import cupy
    import dask
    import dask.array as da
    from distributed import wait

    with client.as_current():
        chunks = [
            da.from_delayed(
                dask.delayed(block)(number, ROWS, COLUMNS), (ROWS, COLUMNS), meta=cupy.empty((0, 0))
            )
            for number in range(N_CHUNKS)
        ]
        began = time.perf_counter()
        whole = client.persist(da.concatenate(chunks))
        wait(whole)
        took_s = {"make": time.perf_counter() - began}
        means = []
        for number in range(PASSES):
            began = time.perf_counter()
            # Different programs: the scheduler returns known results at once.
            squares = (whole + number) ** 2
            means.append(float(client.compute(squares.mean()).result()))
            took_s[f"pass {number + 1}"] = time.perf_counter() - began
    return took_s, means
