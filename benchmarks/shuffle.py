"""Seconds of DataFrame shuffles, stock against the runtime.

The cases have numbers only, mixed types, or many output partitions.
"""

from __future__ import annotations

import time
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.delayed import delayed

from benchmarks.harness import arguments, compare, two_clusters, write_json


def numbers_part(seed: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1 << 40, rows),
            "x": rng.random(rows),
            "y": rng.random(rows),
            "n": rng.integers(0, 1000, rows),
        }
    )


def mixed_part(seed: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    words = np.array([f"customer#{i:09d}" for i in range(5000)], dtype=object)
    modes = pd.Index(["AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK"])
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1 << 30, rows),
            "name": pd.array(words[rng.integers(0, len(words), rows)], dtype="str"),
            "mode": pd.Categorical.from_codes(rng.integers(0, 7, rows), categories=modes),
            "when": np.datetime64("1992-01-01", "ns")
            + rng.integers(0, 2_500, rows).astype("m8[D]"),
            "price": rng.random(rows),
        }
    )


def frame(part: Any, npartitions: int, rows: int) -> list[Any]:
    parts = [delayed(part, pure=True)(seed, rows) for seed in range(npartitions)]
    return [dd.from_delayed(parts, meta=part(0, 1).iloc[:0], verify_meta=False)]


def floor(npartitions: int, rows: int, npartitions_out: int) -> float:
    """Return seconds of the three copies in plain NumPy, in one process with warm memory.

    In a shuffle, two workers share this work.
    """
    parts = [numbers_part(seed, rows).to_numpy().T.copy() for seed in range(npartitions)]
    width = len(parts[0])
    keys = [part[0].astype(np.int64) % npartitions_out for part in parts]
    gathered = [np.empty_like(part) for part in parts]
    moved = [np.empty_like(part) for part in parts]
    out = [np.empty((width, 2 * npartitions * rows // npartitions_out)) for _ in range(4)]
    for arrays in (gathered, moved, out):
        for array in arrays:
            array.fill(0.0)
    began = time.perf_counter()
    bounds = []
    for part, key, target, copy in zip(parts, keys, gathered, moved, strict=True):
        order = np.argsort(key.astype(np.uint16), kind="stable")
        for row in range(width):
            np.take(part[row], order, out=target[row], mode="clip")
        np.copyto(copy, target)
        bounds.append(np.concatenate([[0], np.bincount(key, minlength=npartitions_out).cumsum()]))
    for number in range(npartitions_out):
        pieces = [m[:, b[number] : b[number + 1]] for m, b in zip(moved, bounds, strict=True)]
        n_rows = sum(piece.shape[1] for piece in pieces)
        np.concatenate(pieces, axis=1, out=out[number % 4][:, :n_rows])
    return time.perf_counter() - began


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = int(1_000_000 * options.scale)
    half = int(500_000 * options.scale)
    timings = []
    cases = [
        (
            "1 GB numbers, 32 partitions",
            lambda: frame(numbers_part, 32, rows),
            lambda inputs: inputs[0].shuffle("key"),
            6.0,
            lambda: floor(32, rows, 32),
        ),
        (
            "strings, categories, dates, 16 x 500k rows",
            lambda: frame(mixed_part, 16, half),
            lambda inputs: inputs[0].shuffle("key"),
            3.0,
            None,
        ),
        (
            "500 MB numbers, 32 -> 32 partitions",
            lambda: frame(numbers_part, 32, half),
            lambda inputs: inputs[0].shuffle("key", npartitions=32),
            None,
            None,
        ),
        (
            "500 MB numbers, 32 -> 512 partitions",
            lambda: frame(numbers_part, 32, half),
            lambda inputs: inputs[0].shuffle("key", npartitions=512),
            None,
            None,
        ),
    ]
    with two_clusters() as sides:
        for name, inputs, workload, target, lowest in cases:
            if options.only and options.only not in name:
                continue
            timings.append(
                compare(
                    sides,
                    name,
                    inputs,
                    workload,
                    repeats=options.repeats,
                    target=target,
                    floor=lowest,
                )
            )
    write_json(options.json, timings)


if __name__ == "__main__":
    main()
