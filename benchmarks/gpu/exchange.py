"""A shuffle of cuDF partitions between two worker processes on one GPU: stock Dask and enabled.

Dask's own connections, which stock Dask sends by, are UCX's where distributed-ucxx is installed:
that moves device memory between processes by CUDA IPC. Else they are TCP's, through the host. The
runtime has links over UCX of its own, wherever there is ucxx.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.report import Row, Say
from benchmarks.gpu.timing import medians_s
from dask_gpurt.devices.cuda.driver import why_no_cuda

N_PARTS, ROWS = 16, 4_000_000
POOL_NBYTES = 16 << 30
REPEATS = 3
_ROW_NBYTES = 24


def why_not() -> str:
    if (why := why_no_cuda()) is not None:
        return why
    for name in ("cudf", "dask_cudf", "distributed", "rmm"):
        try:
            __import__(name)
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
    return ""


def part(number: int, rows: int) -> Any:
    import cudf
    import cupy

    rng = cupy.random.default_rng(number)
    columns = {name: rng.random(rows) for name in "ab"}
    return cudf.DataFrame({"key": rng.integers(0, 1 << 25, rows), **columns})


def use_pool(nbytes: int) -> None:
    import rmm

    rmm.reinitialize(pool_allocator=True, initial_pool_size=nbytes)


def protocol() -> str:
    try:
        import distributed_ucxx  # noqa: F401
    except ImportError:
        return "tcp"
    return "ucxx"


def run(say: Say) -> None:
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
                sides[side], lengths[side] = prepared(client)
            except Exception as error:
                # Whether stock Dask can shuffle such frames at all depends on its version.
                say(Row(f"shuffle of device frames, {side}", skipped=repr(error)))
        if not sides:
            return
        took_s = medians_s(sides, REPEATS)
        nbytes = N_PARTS * ROWS * _ROW_NBYTES
        is_compared = len(sides) == 2
        say(
            Row(
                f"shuffle of device frames over {over}",
                nbytes / took_s.get("enabled", took_s.get("stock", 0.0)) / 1e9,
                "GB/s",
                took_s["enabled"] / took_s["stock"] if is_compared else None,
                "seconds enabled / seconds stock" if is_compared else "",
                details={"nbytes": nbytes, "took_s": took_s, "lengths": lengths},
            )
        )


def prepared(client: Any) -> tuple[Callable[[], None], int]:
    """A shuffle that can be timed, and how many rows come out of it."""
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
