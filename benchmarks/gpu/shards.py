"""Section that takes the time of each step from a cuDF partition to its shards, and back.

The yardstick is a copy within the device. `gather and pack` is what a shard costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.exchange import part, use_pool
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import copy_gb_per_s, medians_s, why_skipped

ROWS, N_SHARDS = 4_000_000, 6
POOL_NBYTES = 4 << 30
REPEATS = 9


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_skipped("cudf")


def run(report: Report) -> None:
    """Measure the steps on one partition."""
    use_pool(POOL_NBYTES)
    import cupy
    import numpy as np
    import pylibcudf as plc

    from dask_gpurt.frames.device.cudf_ import CudfMemory, CudfTables

    device_rate = copy_gb_per_s()
    report(Row("copy within the device", device_rate, "GB/s"))
    frame = part(1, ROWS)
    tables = CudfTables()
    table, kinds = tables.take_apart(frame, frame)
    nbytes = tables.nbytes(table)
    numbers = frame["key"] % N_SHARDS
    report(Row("partition", nbytes / 2**20, "MiB"))
    order = cupy.argsort(numbers.values, kind="stable").astype(cupy.int32)
    bounds = [0, *(int(n) for n in np.cumsum(np.bincount(numbers.values.get())))]
    rows_of = [order[start:stop] for start, stop in itertools.pairwise(bounds)]
    gathered = [tables.gather(table, rows) for rows in rows_of]
    packed = [tables.pack(one, CudfMemory.empty) for one in gathered]
    stream = cupy.cuda.Stream.null

    def each(call: Callable[[int], Any]) -> Callable[[], None]:
        def run_all() -> None:
            for number in range(N_SHARDS):
                call(number)
            tables.wait()
            stream.synchronize()

        return run_all

    def whole(number: int) -> None:
        tables.pack(tables.gather(table, rows_of[number]), CudfMemory.empty)

    def sort() -> None:
        cupy.argsort(numbers.values, kind="stable")
        stream.synchronize()

    def sort_by_cudf() -> None:
        plc.sorting.stable_sorted_order(
            plc.Table([plc.Column.from_cuda_array_interface(numbers.values.astype(cupy.int32))]),
            [plc.types.Order.ASCENDING],
            [plc.types.NullOrder.AFTER],
        )
        stream.synchronize()

    def partition() -> None:
        plc.partitioning.partition(
            table,
            plc.Column.from_cuda_array_interface(numbers.values.astype(cupy.int32)),
            N_SHARDS,
        )
        stream.synchronize()

    def once() -> None:
        tables.gather(table, order)
        tables.wait()

    def back() -> None:
        views = [
            tables.slice(tables.view(one[0], one[1]), 0, len(rows))
            for one, rows in zip(packed, rows_of, strict=True)
        ]
        tables.put_together(tables.concatenate(views), kinds, frame)
        stream.synchronize()

    for name, step in {
        "order of the rows, CuPy": sort,
        "order of the rows, cuDF": sort_by_cudf,
        "gather": each(lambda number: tables.gather(table, rows_of[number])),
        "gather of all rows at once": once,
        "pack": each(lambda number: tables.pack(gathered[number], CudfMemory.empty)),
        "gather and pack": each(whole),
        "pack of libcudf": each(lambda number: plc.contiguous_split.pack(gathered[number])),
        "partition by cuDF": partition,
        "memory": each(lambda number: CudfMemory.empty(packed[number][0].nbytes)),
        "view, concatenate, put together": back,
    }.items():
        try:
            took_s = medians_s({name: step}, REPEATS)[name]
        except Exception as error:
            # A step that cuDF does not have, or takes otherwise, must not hide the others.
            report(Row(name, skipped=repr(error)))
            continue
        rate = nbytes / took_s / 1e9
        report(
            Row(
                name,
                rate,
                "GB/s",
                rate / device_rate,
                "this / copy within the device",
                details={"took_s": took_s, "shards": N_SHARDS},
            )
        )
