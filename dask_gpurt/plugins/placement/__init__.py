"""Placement on a live scheduler, which decides by the costs of `dask_gpurt.placement`."""
