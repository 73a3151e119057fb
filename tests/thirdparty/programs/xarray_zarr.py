"""A program with xarray: a data set is rechunked, written to zarr, opened again, and grouped."""

import json
import tempfile

import numpy as np
import pandas as pd
import xarray
from distributed import Client

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"),
    ):
        data = xarray.Dataset(
            {"t": (("time", "y", "x"), generator.normal(size=(120, 20, 30)))},
            coords={"time": pd.date_range("2026-01-01", periods=120, freq="12h")},
        )
        data.chunk(time=10, y=20, x=30).to_zarr(f"{folder}/by_time.zarr", consolidated=False)
        opened = xarray.open_zarr(f"{folder}/by_time.zarr", consolidated=False)
        # From chunks of time to chunks of space: every worker sends data to every other.
        turned = opened.chunk(time=-1, y=5, x=6).drop_encoding()
        turned.to_zarr(f"{folder}/by_space.zarr", consolidated=False)
        again = xarray.open_zarr(f"{folder}/by_space.zarr", consolidated=False)
        # A write into a region of an existing store.
        part = (again * 2).isel(y=slice(0, 10)).drop_vars("time").drop_encoding()
        part.to_zarr(f"{folder}/by_space.zarr", region={"y": slice(0, 10)}, consolidated=False)
        written = xarray.open_zarr(f"{folder}/by_space.zarr", consolidated=False).load()
        months = written.chunk(time=15).groupby("time.month").mean().compute()
        quantiles = again.t.chunk(time=-1).quantile([0.1, 0.9], dim="time").compute()
        smooth = opened.t.rolling(time=5).mean().isel(time=slice(4, None)).sum().compute()
    print(
        json.dumps(
            {
                "written": written.t.sum(("y", "x")).values.tolist(),
                "months": months.t.values[:, 0, :5].tolist(),
                "quantiles": quantiles.values[:, 0, :5].tolist(),
                "smooth": float(smooth),
            }
        )
    )
