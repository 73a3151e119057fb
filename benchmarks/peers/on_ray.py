"""Ray Data on a local Ray of two CPUs.

As "Shuffling data" and "Advanced: performance tips and tuning" advise: `repartition` with keys and
the default shuffle, whole blocks as batches, batches of Arrow, no progress bars.
"""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import ray
from ray.data.aggregate import Count, Mean, Sum

from benchmarks.peers.answers import added, of_aggregation, of_shuffle, sums_of_partition

SETTINGS = {"num_cpus": 2, "object_store_memory": 3 << 30}


def start() -> None:
    """Start a local Ray, which prints nothing."""
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        **SETTINGS,
    )


def sums(block: pa.Table) -> pa.Table:
    names = ("key", "x", "y", "n")
    found = sums_of_partition(*(block[name].to_numpy() for name in names))
    return pa.table({name: [value] for name, value in found.items()})


def reduced(block: pa.Table) -> pa.Table:
    names = ("n", "s", "m", "c")
    found = of_aggregation(*(block[name].to_numpy() for name in names))
    return pa.table({name: [value] for name, value in found.items()})


class OnRay:
    def __init__(self, folder: str, n_partitions: int) -> None:
        self._folder, self._n_partitions = folder, n_partitions
        start()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        self._strategy = str(context.shuffle_strategy)

    def about(self) -> dict[str, Any]:
        return {
            "versions": {"ray": ray.__version__, "pyarrow": pa.__version__},
            "settings": {**SETTINGS, "shuffle_strategy": self._strategy},
        }

    def shuffle(self) -> dict[str, Any]:
        files = ray.data.read_parquet(self._folder)
        shuffled = files.repartition(self._n_partitions, keys=["key"])
        return of_shuffle(self._rows(shuffled, sums))

    def aggregation(self) -> dict[str, Any]:
        groups = ray.data.read_parquet(self._folder).groupby("n", self._n_partitions)
        found = groups.aggregate(
            Sum("x", alias_name="s"), Mean("y", alias_name="m"), Count("y", alias_name="c")
        )
        return added(self._rows(found, reduced))

    def _rows(self, data: Any, function: Any) -> list[dict[str, Any]]:
        parts = data.map_batches(function, batch_size=None, batch_format="pyarrow")
        rows: list[dict[str, Any]] = parts.take_all()
        return rows

    def close(self) -> None:
        ray.shutdown()


def open_session(option: str, folder: str, n_partitions: int) -> OnRay:
    return OnRay(folder, n_partitions)
