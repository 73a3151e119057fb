"""Placement on a live scheduler: it shows tasks and workers to `dask_gpurt.placement`."""
