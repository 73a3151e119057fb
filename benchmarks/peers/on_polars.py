"""Polars in one process: the floor that people know. It moves nothing between processes.

As its user guide advises, lazy scans read the files. It has a thread for each core by itself. Each
partition is gathered whole.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from benchmarks.peers.answers import WEIGHTS, of_shuffle, sums_of_partition


class OnPolars:
    def __init__(self, folder: str, n_partitions: int) -> None:
        self._files, self._n_partitions = f"{folder}/*.parquet", n_partitions

    def about(self) -> dict[str, Any]:
        return {
            "versions": {"polars": pl.__version__},
            "settings": {"threads": pl.thread_pool_size()},
        }

    def shuffle(self) -> dict[str, Any]:
        number = (pl.col("key").hash() % self._n_partitions).alias("partition")
        rows = pl.scan_parquet(self._files).with_columns(number).collect()
        names = ("key", "x", "y", "n")
        return of_shuffle(
            sums_of_partition(*(part[name].to_numpy() for name in names))
            for part in rows.partition_by("partition", maintain_order=False, include_key=False)
        )

    def aggregation(self) -> dict[str, Any]:
        groups = pl.scan_parquet(self._files).group_by("n")
        found = groups.agg(s=pl.col("x").sum(), m=pl.col("y").mean(), c=pl.col("y").count())
        sums = found.select(
            groups=pl.len().cast(pl.Int64),
            rows=pl.col("c").cast(pl.Int64).sum(),
            sum=pl.col("s").sum(),
            mean=pl.col("m").sum(),
            weighted=(pl.col("s") * (pl.col("n") % WEIGHTS)).sum(),
        )
        return sums.collect().row(0, named=True)

    def close(self) -> None:
        pass


def open_session(option: str, folder: str, n_partitions: int) -> OnPolars:
    return OnPolars(folder, n_partitions)
