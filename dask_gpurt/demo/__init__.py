"""The ``dask gpurt demo`` command: stock Dask against Dask with this runtime, on real data.

The package generates TPC-H tables, and reads the 2013 flights out of New York from a PyPI package.
It runs ordinary :mod:`dask.dataframe` queries over both, and checks every answer against DuckDB.
The runtime itself imports nothing from here.

:mod:`dask_gpurt.demo.command` is the entry point.
"""
