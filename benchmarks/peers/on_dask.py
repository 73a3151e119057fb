"""Dask on two one-thread worker processes: with the `tasks` shuffle, stock p2p, and the runtime.

Two processes of one thread each, because pandas holds the interpreter's lock: "Dask DataFrame best
practices" and the page of `LocalCluster`. Many groups: `split_out`, as the page "Groupby" says.
"""

from __future__ import annotations

import contextlib
from typing import Any

import dask
import dask.dataframe as dd
import distributed
import pandas as pd
import pyarrow

import dask_gpurt
from benchmarks.harness import stock_client
from benchmarks.peers.answers import added, of_aggregation, of_shuffle, sums_of_partition


def sums(part: pd.DataFrame) -> pd.DataFrame:
    found = sums_of_partition(*(part[name].to_numpy() for name in ("key", "x", "y", "n")))
    return pd.DataFrame({"sums": [found]})


def reduced(part: pd.DataFrame) -> pd.DataFrame:
    columns = (part[name].to_numpy() for name in ("sum", "mean", "count"))
    return pd.DataFrame({"sums": [of_aggregation(part.index.to_numpy(), *columns)]})


META = pd.DataFrame({"sums": pd.Series(dtype=object)})


class OnDask:
    def __init__(self, option: str, folder: str, n_partitions: int) -> None:
        self._folder, self._n_partitions = folder, n_partitions
        self._method = "tasks" if option == "tasks" else "p2p"
        self._stack = contextlib.ExitStack()
        # Dask would make strings of objects, such as the sums of a partition.
        self._stack.enter_context(dask.config.set({"dataframe.convert-string": False}))
        self._client = self._stack.enter_context(stock_client(2))
        self._stack.enter_context(self._client.as_current())
        self._is_ours = option == "gpurt"
        if self._is_ours:
            dask_gpurt.enable(self._client)

    def about(self) -> dict[str, Any]:
        modules = (dask, distributed, pd, pyarrow, *((dask_gpurt,) if self._is_ours else ()))
        settings = {"workers": 2, "threads": 1, "shuffle_method": self._method}
        return {
            "versions": {one.__name__: one.__version__ for one in modules},
            "settings": {**settings, "split_out": self._n_partitions},
        }

    def _sums(self, frame: Any, function: Any) -> list[dict[str, Any]]:
        parts = frame.map_partitions(function, meta=META)
        return [*self._client.compute(parts).result()["sums"]]

    def shuffle(self) -> dict[str, Any]:
        frame = dd.read_parquet(self._folder)
        shuffled = frame.shuffle("key", npartitions=self._n_partitions, shuffle_method=self._method)
        return of_shuffle(self._sums(shuffled, sums))

    def aggregation(self) -> dict[str, Any]:
        grouped = dd.read_parquet(self._folder).groupby("n")
        found = grouped.agg(
            {"x": "sum", "y": ["mean", "count"]},
            split_out=self._n_partitions,
            shuffle_method=self._method,
        )
        found.columns = ["sum", "mean", "count"]
        return added(self._sums(found, reduced))

    def close(self) -> None:
        self._stack.close()


def open_session(option: str, folder: str, n_partitions: int) -> OnDask:
    return OnDask(option, folder, n_partitions)
