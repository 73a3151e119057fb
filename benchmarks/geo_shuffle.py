"""Seconds of shuffles of GeoDataFrames, by a column and by place, on both sides.

Needs dask-geopandas, which the `test` extra installs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import dask_geopandas  # noqa: F401 -- tells Dask about GeoDataFrames
import geopandas
import numpy as np
import pandas as pd
import shapely

from benchmarks.harness import arguments, compare, two_clusters, write_json
from benchmarks.shuffle import frame

N_PARTS = 32


def points_part(seed: int, rows: int) -> Any:
    rng = np.random.default_rng(seed)
    return geopandas.GeoDataFrame(
        {
            "n": np.arange(rows),
            "key": rng.integers(0, 1 << 30, rows),
            "text": pd.array([f"name-{i % 100}" for i in range(rows)], dtype="str"),
        },
        geometry=shapely.points(rng.uniform(0, 100, rows), rng.uniform(0, 50, rows)),
        crs="EPSG:4326",
    )


def areas_part(seed: int, rows: int) -> Any:
    """Return polygons with 17 corners."""
    made = points_part(seed, rows)
    made["geometry"] = shapely.buffer(np.asarray(made.geometry), 0.1, quad_segs=4)
    return made.set_crs("EPSG:4326", allow_override=True)


def by_column(inputs: Any) -> Any:
    return inputs[0].shuffle("key")


def by_place(inputs: Any) -> Any:
    return inputs[0].spatial_shuffle(npartitions=N_PARTS, calculate_partitions=False)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    timings = []
    with two_clusters() as sides:
        for part, rows in ((points_part, 10_000), (areas_part, 3_000)):
            rows = int(rows * options.scale)
            for way in (by_column, by_place):
                timings.append(
                    compare(
                        sides,
                        f"{part.__name__}, {way.__name__}, {N_PARTS} x {rows:,} rows",
                        partial(frame, part, N_PARTS, rows),
                        way,
                        repeats=options.repeats,
                    )
                )
    write_json(options.json, timings)


if __name__ == "__main__":
    main()
