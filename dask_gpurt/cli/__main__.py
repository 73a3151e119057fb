"""``python -m dask_gpurt.cli``, for environments whose ``dask`` is another one."""

from dask_gpurt.cli import gpurt

if __name__ == "__main__":
    gpurt(prog_name="dask gpurt")
