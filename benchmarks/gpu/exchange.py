"""Section that exchanges data between two workers on one GPU: stock Dask against ours.

It shuffles cuDF partitions and rechunks a CuPy array. The yardstick is a copy within the device.

If distributed-ucxx is installed, stock Dask sends over UCX, which moves device memory between
processes by CUDA IPC. Otherwise it sends over TCP, through the host. The runtime opens UCX links of
its own if ucxx is installed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import copy_gb_per_s, medians_s, why_skipped

N_PARTS, ROWS, MANY_ROWS = 16, 2_000_000, 20_000_000
#: Elements of float64 along each axis of the array, and chunks of rows before, of columns after.
N_ELEMENTS, N_CHUNKS = 32_768, 16
BOTH = ("stock", "enabled")
#: RMM's pool of each worker: four at a time, and two.
POOL_NBYTES, LARGE_POOL_NBYTES = 8 << 30, 24 << 30
REPEATS = 3
_ROW_NBYTES = 24


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_skipped("cudf", "dask_cudf", "distributed", "rmm")


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


def block(number: int, rows: int, columns: int) -> Any:
    """Make one chunk of rows."""
    import cupy

    return cupy.random.default_rng(number).random((rows, columns))


def run(report: Report) -> None:
    """Exchange on a stock cluster and on an enabled one, in turns."""
    device_rate = copy_gb_per_s()
    report(Row("copy within the device", device_rate, "GB/s"))

    def shuffle(name: str, rows: int, pool_nbytes: int, sides: Sequence[str]) -> None:
        nbytes = N_PARTS * rows * _ROW_NBYTES
        prepare = partial(frames, rows=rows, pool_nbytes=pool_nbytes)
        measure(name, prepare, nbytes, device_rate, report, sides)

    measure("rechunk of device arrays", arrays, N_ELEMENTS**2 * 8, device_rate, report, BOTH)
    shuffle("shuffle of device frames", ROWS, POOL_NBYTES, BOTH)
    # Stock takes minutes for this.
    shuffle("shuffle of large device frames", MANY_ROWS, LARGE_POOL_NBYTES, ["enabled"])


def measure(
    name: str,
    prepare: Callable[[Any], Any],
    nbytes: int,
    device_rate: float,
    report: Report,
    wanted: Sequence[str],
) -> None:
    """Report the times of one exchange on its clusters.

    Parameters
    ----------
    prepare
        Returns the exchange of a client, and a number that all sides must find.
    wanted
        The sides: `BOTH`, or one of them.
    """
    import dask
    from distributed import Client, LocalCluster

    import dask_gpurt

    over = protocol()
    with contextlib.ExitStack() as stack:
        sides: dict[str, Exchange] = {}
        answers: dict[str, Any] = {}
        for side in wanted:
            with dask.config.set({"gpurt.enabled": False}):
                cluster = stack.enter_context(
                    LocalCluster(
                        n_workers=2, threads_per_worker=1, protocol=over, dashboard_address=":0"
                    )
                )
                client = stack.enter_context(Client(cluster, set_as_default=False))
            if side == "enabled":
                dask_gpurt.enable(client)
            try:
                sides[side], answers[side] = prepare(client)
            except Exception as error:
                # Not every version of stock Dask can exchange such data.
                report(Row(f"{name}, {side}", skipped=repr(error)))
        if not sides:
            return
        took_s = medians_s(
            {side: exchange.run for side, exchange in sides.items()},
            REPEATS,
            partial(_until_forgotten, list(sides.values())),
        )
        rate = nbytes / took_s.get("enabled", took_s.get("stock", 0.0)) / 1e9
        is_compared = len(sides) == 2
        report(
            Row(
                f"{name} over {over}",
                rate,
                "GB/s",
                took_s["enabled"] / took_s["stock"] if is_compared else None,
                "seconds enabled / seconds stock" if is_compared else "",
                details={
                    "nbytes": nbytes,
                    "took_s": took_s,
                    "answers": answers,
                    "of_copy_within_the_device": rate / device_rate,
                    "runs": dask_gpurt.status(client)["runs"],
                },
            )
        )


def frames(client: Any, rows: int, pool_nbytes: int) -> tuple[Exchange, int]:
    """Return the shuffle, and the number of rows that it returns."""
    from dask.dataframe import from_map

    client.run(use_pool, pool_nbytes)
    with client.as_current():
        frame = _persisted(client, from_map(part, range(N_PARTS), rows=rows))
        shuffled = frame.shuffle("key")
        length = int(client.compute(shuffled.map_partitions(len).sum()).result())
    return Exchange(client, shuffled), length


def arrays(client: Any) -> tuple[Exchange, float]:
    """Return the rechunk, and the sum of the array's elements."""
    import cupy
    import dask
    import dask.array as da

    rows = N_ELEMENTS // N_CHUNKS
    with client.as_current():
        blocks = [
            da.from_delayed(
                dask.delayed(block)(number, rows, N_ELEMENTS),
                (rows, N_ELEMENTS),
                meta=cupy.empty((0, 0)),
            )
            for number in range(N_CHUNKS)
        ]
        whole = _persisted(client, da.concatenate(blocks))
        rechunked = whole.rechunk((N_ELEMENTS, rows))
        total = float(client.compute(rechunked.sum()).result())
    return Exchange(client, rechunked), total


def _persisted(client: Any, lazy: Any) -> Any:
    from distributed import wait

    kept = client.persist(lazy)
    wait(kept)
    return kept


class Exchange:
    """An exchange of a client, which can be repeated."""

    def __init__(self, client: Any, lazy: Any) -> None:
        self._client = client
        self._lazy = lazy
        self._keys: list[Any] = []

    def run(self) -> None:
        """Run the exchange, and drop its result."""
        from dask.core import flatten

        with self._client.as_current():
            kept = _persisted(self._client, self._lazy)
            self._keys = list(flatten(kept.__dask_keys__()))

    def until_forgotten(self) -> None:
        """Wait until the scheduler has forgotten the last result: it would return that again."""
        while self._client.run_on_scheduler(_knows, keys=self._keys):
            time.sleep(0.005)


def _until_forgotten(exchanges: Sequence[Exchange]) -> None:
    for exchange in exchanges:
        exchange.until_forgotten()


def _knows(dask_scheduler: Any, keys: list[Any]) -> bool:
    return any(key in dask_scheduler.tasks for key in keys)
