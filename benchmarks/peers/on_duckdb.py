"""DuckDB in one process: the floor that people know. It moves nothing between processes.

"Tuning workloads": a thread for each core, and no order of insertion to keep. DuckDB has no
partitions. A table in the order of partition numbers has the rows of each in one place.
"""

from __future__ import annotations

import os
from typing import Any

import duckdb

from benchmarks.peers.answers import SAMPLED, WEIGHTS, of_shuffle

_SHUFFLE = """
    CREATE OR REPLACE TEMP TABLE shuffled AS
    SELECT *, hash(key) % {n} AS number FROM read_parquet('{files}') ORDER BY number
"""
_SUMS = """
    SELECT number, count(*) AS rows, sum(key)::BIGINT AS key, sum(n)::BIGINT AS n,
        sum(x) AS x, sum(y) AS y,
        coalesce(list(DISTINCT key) FILTER (key % {sampled} = 0), []) AS keys
    FROM shuffled GROUP BY number
"""
_AGGREGATION = """
    SELECT count(*) AS groups, sum(c)::BIGINT AS rows, sum(s) AS sum, sum(m) AS mean,
        sum(s * (n % {weights})) AS weighted
    FROM (
        SELECT n, sum(x) AS s, avg(y) AS m, count(y) AS c
        FROM read_parquet('{files}') GROUP BY n
    )
"""


class OnDuckdb:
    def __init__(self, folder: str, n_partitions: int) -> None:
        self._files, self._n_partitions = f"{folder}/*.parquet", n_partitions
        n_threads = os.cpu_count() or 1
        self._settings: dict[str, Any] = {"threads": n_threads, "preserve_insertion_order": False}
        self._connection = duckdb.connect(config=self._settings)

    def about(self) -> dict[str, Any]:
        return {"versions": {"duckdb": duckdb.__version__}, "settings": self._settings}

    def _rows(self, query: str) -> list[dict[str, Any]]:
        found = self._connection.execute(query)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def shuffle(self) -> dict[str, Any]:
        self._connection.execute(_SHUFFLE.format(n=self._n_partitions, files=self._files))
        return of_shuffle(self._rows(_SUMS.format(sampled=SAMPLED)))

    def aggregation(self) -> dict[str, Any]:
        (row,) = self._rows(_AGGREGATION.format(files=self._files, weights=WEIGHTS))
        return row

    def close(self) -> None:
        self._connection.close()


def open_session(option: str, folder: str, n_partitions: int) -> OnDuckdb:
    return OnDuckdb(folder, n_partitions)
