"""Daft with its native runner, which its documentation names for one machine, and on Ray.

The native runner leaves out a repartition, and says so in its plan. So the shuffle is for the Ray
runner alone, on a local Ray of two CPUs. A partition is reduced by a task of Ray.
"""

from __future__ import annotations

from typing import Any

import daft
from daft import col

from benchmarks.peers.answers import WEIGHTS, of_shuffle, sums_of_partition


def sums(part: Any) -> dict[str, Any]:
    table = part.to_arrow()
    return sums_of_partition(*(table[name].to_numpy() for name in ("key", "x", "y", "n")))


class OnDaft:
    def __init__(self, runner: str, folder: str, n_partitions: int) -> None:
        self._files, self._n_partitions = f"{folder}/*.parquet", n_partitions
        self._versions = {"daft": daft.__version__}
        self._settings: dict[str, Any] = {"runner": runner}
        self._ray: Any = None
        if runner == "native":
            daft.set_runner_native()
        else:
            import ray

            from benchmarks.peers import on_ray

            self._ray = ray
            self._versions["ray"] = ray.__version__
            self._settings |= on_ray.SETTINGS
            on_ray.start()
            daft.set_runner_ray()

    def about(self) -> dict[str, Any]:
        return {"versions": self._versions, "settings": self._settings}

    def shuffle(self) -> dict[str, Any]:
        shuffled = daft.read_parquet(self._files).repartition(self._n_partitions, "key")
        reduce = self._ray.remote(sums)
        parts = [reduce.remote(part) for part in shuffled.iter_partitions()]
        return of_shuffle(self._ray.get(parts))

    def aggregation(self) -> dict[str, Any]:
        groups = daft.read_parquet(self._files).groupby("n")
        found = groups.agg(
            col("x").sum().alias("s"), col("y").mean().alias("m"), col("y").count().alias("c")
        )
        weighted = (col("s") * (col("n") % WEIGHTS)).alias("w")
        sums = found.select(col("n"), col("s"), col("m"), col("c"), weighted).agg(
            col("n").count().alias("groups"),
            col("c").sum().alias("rows"),
            col("s").sum().alias("sum"),
            col("m").sum().alias("mean"),
            col("w").sum().alias("weighted"),
        )
        (row,) = sums.to_pylist()
        return dict(row)

    def close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()


def open_session(option: str, folder: str, n_partitions: int) -> OnDaft:
    return OnDaft(option, folder, n_partitions)
