"""Section that shuffles cuDF partitions between two workers on one GPU: stock Dask against ours.

If distributed-ucxx is installed, stock Dask sends over UCX, which moves device memory between
processes by CUDA IPC. Otherwise it sends over TCP, through the host. The runtime opens UCX links of
its own if ucxx is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s
from dask_gpurt.devices.cuda.driver import why_no_cuda

N_PARTS, ROWS = 16, 4_000_000
POOL_NBYTES = 16 << 30
REPEATS = 3
_ROW_NBYTES = 24


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    if (reason := why_no_cuda()) is not None:
        return reason
    for name in ("cudf", "dask_cudf", "distributed", "rmm"):
        try:
            __import__(name)
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
    return ""


def part(number: int, rows: int) -> Any:
    """Make one partition."""
    import cudf
    import cupy

    rng = cupy.random.default_rng(number)
    columns = {name: rng.random(rows) for name in "ab"}
    return cudf.DataFrame({"key": rng.integers(0, 1 << 25, rows), **columns})


def use_pool(nbytes: int) -> None:
    """Let RMM allocate from a pool, in the process of a worker."""
    import rmm

    rmm.reinitialize(pool_allocator=True, initial_pool_size=nbytes)


def protocol() -> str:
    """Return the protocol of Dask's connections."""
    try:
        import distributed_ucxx  # noqa: F401
    except ImportError:
        return "tcp"
    return "ucxx"


def run(report: Report) -> None:
    """Shuffle on a stock cluster and on an enabled one, in turns."""
    import dask
    from distributed import Client, LocalCluster

    import dask_gpurt

    over = protocol()
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[], None]] = {}
        lengths: dict[str, int] = {}
        for side in ("stock", "enabled"):
            with dask.config.set({"gpurt.enabled": False}):
                cluster = stack.enter_context(
                    LocalCluster(
                        n_workers=2, threads_per_worker=1, protocol=over, dashboard_address=":0"
                    )
                )
                client = stack.enter_context(Client(cluster, set_as_default=False))
            client.run(use_pool, POOL_NBYTES)
            if side == "enabled":
                dask_gpurt.enable(client)
            try:
                sides[side], lengths[side] = prepare(client)
            except Exception as error:
                # Not every version of stock Dask can shuffle such frames.
                report(Row(f"shuffle of device frames, {side}", skipped=repr(error)))
        if not sides:
            return
        took_s = medians_s(sides, REPEATS)
        nbytes = N_PARTS * ROWS * _ROW_NBYTES
        is_compared = len(sides) == 2
        report(
            Row(
                f"shuffle of device frames over {over}",
                nbytes / took_s.get("enabled", took_s.get("stock", 0.0)) / 1e9,
                "GB/s",
                took_s["enabled"] / took_s["stock"] if is_compared else None,
                "seconds enabled / seconds stock" if is_compared else "",
                details={"nbytes": nbytes, "took_s": took_s, "lengths": lengths},
            )
        )


def prepare(client: Any) -> tuple[Callable[[], None], int]:
    """Return a function that runs the shuffle, and the number of rows that it returns."""
    from dask.dataframe import from_map
    from distributed import wait

    with client.as_current():
        frame = client.persist(from_map(part, range(N_PARTS), rows=ROWS))
        wait(frame)
        shuffled = frame.shuffle("key")
        length = int(client.compute(shuffled.map_partitions(len).sum()).result())

    def once() -> None:
        with client.as_current():
            result = client.persist(shuffled)
            wait(result)

    return once, length
