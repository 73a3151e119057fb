"""The material of ``dask gpurt demo``: stock Dask against Dask with this runtime, on real data.

The package makes TPC-H tables on the spot and takes the flights of 2013 out of New York from a
PyPI package, runs ordinary :mod:`dask.dataframe` queries over both, and checks every answer
against DuckDB. Nothing in here is imported by the runtime itself: a program which only uses
``dask_gpurt`` never pays for it.

Start reading at :mod:`dask_gpurt.demo.command`.
"""
