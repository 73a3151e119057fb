"""Seconds of array rechunks, stock against the runtime.

The cases are rows to columns, slabs of time to pencils and back, and many small pieces.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import dask
import dask.array as da
import numpy as np

from benchmarks.harness import arguments, compare, two_clusters, write_json


def array(shape: tuple[int, ...], chunks: tuple[int, ...]) -> list[Any]:
    return [da.random.default_rng(7).random(shape, chunks=chunks)]


def rechunked(chunks: tuple[int, ...], merge: str) -> Any:
    """Make a workload that rechunks to `chunks`, with `merge` as Dask's `array.chunk-size`.

    Before a P2P rechunk, Dask merges small input chunks up to that size, by ordinary tasks. This
    work is the same on both sides.
    """

    def workload(inputs: list[Any]) -> Any:
        with dask.config.set({"array.chunk-size": merge}):
            return inputs[0].rechunk(chunks, method="p2p")

    return workload


def floor(rows: int, columns: int, n_chunks: int) -> float:
    """Return seconds of the three copies in plain NumPy, in one process with warm memory.

    In a rechunk, two workers share this work.
    """
    height, width = rows // n_chunks, columns // n_chunks
    chunk = np.random.default_rng(7).random((height, columns))
    shards = np.zeros((n_chunks, height, width))
    moved = np.zeros((n_chunks, n_chunks, height, width))
    out = [np.zeros((rows, width)) for _ in range(4)]
    began = time.perf_counter()
    for source in range(n_chunks):
        for number in range(n_chunks):
            shards[number] = chunk[:, number * width : (number + 1) * width]
        moved[source] = shards
    for number in range(n_chunks):
        for source in range(n_chunks):
            out[number % 4][source * height : (source + 1) * height] = moved[source, number]
    return time.perf_counter() - began


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    side = int(8000 * options.scale**0.5) // 32 * 32
    steps = int(2000 * options.scale) // 40 * 40
    cube = (steps, 200, 200)
    slab, pencil = (steps // 40, 200, 200), (steps, 25, 40)
    rows, columns = (side // 32, side), (side, side // 32)
    cases = [
        ("512 MB rows -> columns", (side, side), rows, columns, "1MiB", 2.0),
        ("512 MB rows -> columns, merged by Dask", (side, side), rows, columns, "128MiB", None),
        ("640 MB slabs -> pencils", cube, slab, pencil, "1MiB", 2.0),
        ("640 MB pencils -> slabs", cube, pencil, slab, "1MiB", 2.0),
        ("512 MB, 250 x 250 pieces", (side, side), (32, side), (side, 32), "1MiB", None),
    ]
    timings = []
    with two_clusters() as sides:
        for name, shape, old, new, merge, target in cases:
            if options.only and options.only not in name:
                continue
            timings.append(
                compare(
                    sides,
                    name,
                    partial(array, shape, old),
                    rechunked(new, merge),
                    repeats=options.repeats,
                    target=target,
                    floor=(lambda: floor(side, side, 32)) if target and len(shape) == 2 else None,
                )
            )
    write_json(options.json, timings)


if __name__ == "__main__":
    main()
