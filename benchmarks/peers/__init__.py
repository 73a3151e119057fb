"""The same two works by Spark, Daft, Ray Data, Polars, DuckDB, stock Dask and the runtime."""
