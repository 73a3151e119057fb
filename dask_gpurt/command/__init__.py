"""What stands behind ``dask gpurt ...``: one module a job, none of them imported before it is used.

`dask_gpurt.cli` parses the command line and calls into here. Nothing in the data plane imports
this package.
"""
