"""Checks of `dask gpurt doctor` that need no cluster: this environment, and its job or pod."""
