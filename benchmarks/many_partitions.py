"""Seconds with as many inputs as outputs, in the hundreds: costs of bytes, of pairs, of tasks.

Every case has a twin with hardly any data: as many tasks, in the same graph. What a case takes
beyond its twin is the cost of its bytes and of its pairs of partitions. Frames of 32 partitions
show the cost of the bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd

from benchmarks.harness import Timing, arguments, compare, two_clusters, write_json
from benchmarks.shuffle import frame, mixed_part, numbers_part

#: Rows of about 500 MB of numbers, and of mixed columns.
NUMBERS, MIXED = 15_625_000, 8_000_000
#: Rows of a partition of a twin.
FEW = 10


def shuffled(part: Any, n: int, rows: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return inputs and workload of a shuffle of n partitions to n."""
    return lambda: frame(part, n, rows), lambda inputs: inputs[0].shuffle("key", npartitions=n)


def merged(n: int, rows: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return inputs and workload of a merge of two frames of n partitions."""

    def inputs() -> list[dd.DataFrame]:
        return [*frame(numbers_part, n, rows), *frame(numbers_part, n, rows)]

    def workload(inputs: list[dd.DataFrame]) -> dd.DataFrame:
        left, right = inputs
        return left.merge(right[["key", "x"]], on="key", npartitions=n)

    return inputs, workload


def rechunked(side: int, chunk: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return inputs and workload of a rechunk from 100 slabs to square chunks."""

    def workload(inputs: list[da.Array]) -> da.Array:
        with dask.config.set({"array.rechunk.method": "p2p"}):
            return inputs[0].rechunk((chunk, chunk))

    return lambda: [da.ones((side, side), chunks=(side // 100, side))], workload


def cases() -> list[tuple[str, tuple[Callable[[], Any], Callable[[Any], Any]], float | None]]:
    """Return name, inputs and workload, and the wanted ratio of each case."""
    return [
        ("500 MB numbers, 32 x 32", shuffled(numbers_part, 32, NUMBERS // 32), None),
        ("500 MB numbers, 512 x 512", shuffled(numbers_part, 512, NUMBERS // 512), None),
        ("few rows, 512 x 512", shuffled(numbers_part, 512, FEW), None),
        ("strings and categories, 512 x 512", shuffled(mixed_part, 512, MIXED // 512), 4.0),
        ("merge of two frames, 256 x 256", merged(256, NUMBERS // 256), 4.0),
        ("rechunk to 10,000 chunks of 64 kB", rechunked(9_000, 90), 4.0),
        ("rechunk to 10,000 chunks of 8 B", rechunked(100, 1), None),
        ("500 MB numbers, 2000 x 2000", shuffled(numbers_part, 2000, NUMBERS // 2000), None),
        ("few rows, 2000 x 2000", shuffled(numbers_part, 2000, FEW), None),
    ]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    timings: list[Timing] = []
    with two_clusters() as sides:
        for name, (inputs, workload), target in cases():
            if options.only and options.only not in name:
                continue
            timings.append(
                compare(sides, name, inputs, workload, repeats=options.repeats, target=target)
            )
    write_json(options.json, timings)


if __name__ == "__main__":
    main()
