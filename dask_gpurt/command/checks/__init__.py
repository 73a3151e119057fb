"""Checks of `dask gpurt doctor` that need no cluster: this environment, and the job it runs in."""
