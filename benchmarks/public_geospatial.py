"""Seconds of Dask programs for climate data that others wrote, stock against the runtime.

The programs are workloads of `tests/geospatial` in github.com/coiled/benchmarks. Pass the directory
of a checkout; nothing of it is changed. They read ERA5 from a cloud, hundreds of gigabytes of it.
Here they read arrays with the same names, dimensions and chunks from this machine, on a coarser
grid. Both sides write their results, and these are compared.

    python -m benchmarks.public_geospatial DIR
    python -m benchmarks.public_geospatial DIR --only climatology --repeats 5

Each run has a new cluster of two workers, whose program has the one flag or not. Sides take turns.
It needs xarray, zarr and flox.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pandas as pd

from benchmarks.harness import Timing, arguments, flagged_client, write_json

#: Workers have a tenth of the memory that the programs expect, so their own choice of chunks, at
#: the default of 128 MiB, would not fit on either side.
CHUNK_SIZE = "16 MiB"


class Data(NamedTuple):
    """Arrays that a program reads, with a chunk for each time.

    Parameters
    ----------
    degrees
        Distance between two points of the grid.
    n_levels
        Heights of each point; 0 for arrays without this dimension.
    """

    name: str
    degrees: float
    first: str
    last: str
    hours: int
    variables: tuple[str, ...]
    n_levels: int = 0

    def made(self, folder: Path) -> Path:
        """Make the arrays in a folder, if they are not there; return their store."""
        import xarray as xr

        found = folder / self.name
        if found.exists():
            return found
        times = pd.date_range(self.first, self.last, freq=f"{self.hours}h")
        latitude = np.linspace(90, -90, int(180 / self.degrees) + 1)
        longitude = np.arange(0, 360, self.degrees)
        places: dict[str, Any] = {"latitude": latitude, "longitude": longitude}
        if self.n_levels:
            places = {"level": np.arange(self.n_levels), **places}
        shape = [len(times), *map(len, places.values())]
        random = da.random.default_rng(7)
        arrays = {
            name: (["time", *places], random.random(shape, dtype="f4", chunks=(1, *shape[1:])))
            for name in self.variables
        }
        # A store that was left half-written must not be taken for a whole one.
        half = folder / f"{self.name}.half"
        xr.Dataset(arrays, {"time": times, **places}).to_zarr(half, mode="w", consolidated=True)
        return half.rename(found)


SURFACE = "sea_surface_temperature"
HOURLY = Data("hourly", 0.5, "2020-01-01", "2020-03-31T23", 1, (SURFACE,))
SIX_HOURLY = Data("six-hourly", 1, "2020-01-01", "2022-12-31T18", 6, (SURFACE,))
WINDS = Data(
    "winds",
    4,
    "2020-01-01",
    "2020-02-01T23",
    1,
    ("u_component_of_wind", "v_component_of_wind", "temperature", "vertical_velocity"),
    n_levels=37,
)
#: Module and function of each program, and its data. `climatology.highlevel_api` is left out. Its
#: graph has 6.6 million tasks, and building it takes seven minutes on either side.
PROGRAMS = {
    "rechunking": ("era5_rechunking", HOURLY),
    "climatology": ("rechunk_map_blocks", SIX_HOURLY),
    "atmospheric_circulation": ("atmospheric_circulation", WINDS),
}


def taken_s(
    program: Callable[..., object], data: Path, result: Path, side: str, memory: str
) -> float:
    """Return the seconds that a program takes on a new cluster, until its result is written."""
    import xarray as xr

    def write(dataset: Any, store: str, **_: object) -> None:
        # The programs ask for a delayed write, and stock Dask 2026.7 fails there: it loses the
        # dependencies of a rechunk by `p2p`. So both sides write here.
        to_zarr(dataset, store)

    open_zarr, to_zarr = xr.open_zarr, xr.Dataset.to_zarr
    with (
        dask.config.set({"array.chunk-size": CHUNK_SIZE}),
        flagged_client(side == "enabled", memory),
        mock.patch.object(xr, "open_zarr", lambda _url, **how: open_zarr(data, **how)),
        mock.patch.object(xr.Dataset, "to_zarr", write),
    ):
        began = time.perf_counter()
        program(scale="small", storage_url=str(result), storage_options=None)
        return time.perf_counter() - began


def same(one: Path, other: Path) -> bool:
    """Return whether two stores have the same arrays, bit for bit."""
    import xarray as xr

    with xr.open_zarr(one, chunks=None) as a, xr.open_zarr(other, chunks=None) as b:
        return bool(a.identical(b))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("checkout", type=Path, metavar="DIR", help="checkout of coiled/benchmarks")
    parser.add_argument("--memory", default="2 GiB", help="memory limit of each worker")
    parser.add_argument("--folder", type=Path, default=Path("build/public"), help="for the data")
    options = parser.parse_args()
    # Workers inherit this; the programs make xarray warn at each task.
    os.environ["PYTHONWARNINGS"] = "ignore"
    # Its package is named `tests`, too.
    sys.path.insert(0, str(options.checkout.absolute()))
    options.folder.mkdir(parents=True, exist_ok=True)
    timings, differ = [], []
    for name, (function, data) in PROGRAMS.items():
        if (options.only or "") not in name:
            continue
        module = importlib.import_module(f"tests.geospatial.workloads.{name}")
        results = {side: options.folder / f"result-{side}" for side in ("stock", "enabled")}
        run = partial(taken_s, getattr(module, function), data.made(options.folder))
        timing = Timing(name, 0)
        order = list(results.items())
        for repeat in range(options.repeats):
            for side, result in order:
                shutil.rmtree(result, ignore_errors=True)
                getattr(timing, f"{side}_s").append(run(result, side, options.memory))
            order.reverse()
            print(f"  {name}: {repeat + 1}/{options.repeats}", file=sys.stderr, flush=True)
        print(timing.line(), flush=True)
        timings.append(timing)
        if not same(*results.values()):
            print(f"{name}: the results differ", flush=True)
            differ.append(name)
        for result in results.values():
            shutil.rmtree(result)
    write_json(options.json, timings, differ=differ)


if __name__ == "__main__":
    main()
