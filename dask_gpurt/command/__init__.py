"""Implementation of the ``dask gpurt`` commands, one module per job, each imported on first use.

`dask_gpurt.cli` parses the command line and calls this package. Nothing in the data plane imports
it.
"""
