"""Stock Dask against the runtime, side by side in one run. `python -m benchmarks.shuffle`."""
