"""The choice of the data plane of each shuffle run: this package's, or that of stock Dask.

A run uses ours if every worker is ready and an adapter supports its data. Otherwise stock Dask runs
it; the reason is counted, and logged once. If `gpurt.strict` is true, the run fails instead.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from dask_gpurt.config import Settings
from dask_gpurt.errors import StrictFallbackError
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.patches import p2p
from dask_gpurt.plugins.scheduler.readiness import Readiness

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

#: Most shuffles whose sketch is kept, in case they restart.
MAX_SKETCHES = 256
#: Limit of reasons that are kept.
MAX_REASONS = 100


class DataPlaneChoice:
    """Chooses the data plane of each run, and counts the choices.

    Attributes
    ----------
    runs
        Number of runs by data plane: `gpurt` and `stock`.
    fallbacks
        Number of runs left to stock Dask, by kind of run and reason.
    """

    def __init__(self, scheduler: Scheduler, readiness: Readiness) -> None:
        self._scheduler, self._readiness = scheduler, readiness
        self.runs: Counter[str] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self._sketches: OrderedDict[str, list[int]] = OrderedDict()

    def choose(
        self, stock: p2p.ShuffleSpec[Any], settings: Settings, *, keeps_shards: bool
    ) -> p2p.ShuffleSpec[Any]:
        """Return the spec to run: ours if there is no obstacle, else the stock one.

        Parameters
        ----------
        keeps_shards
            Whether outputs of this shuffle were read again, so that its shards are kept longer.

        Raises
        ------
        StrictFallbackError
            There is an obstacle, and `gpurt.strict` is true.
        """
        if not self._readiness.is_open:
            return stock  # switched off while this run waited for joining workers
        # Imported here: they load a third of the runtime. A scheduler starts sooner without them.
        from dask_gpurt.plugins.shuffle.array_run import ArraySpec
        from dask_gpurt.plugins.shuffle.frame_run import FrameSpec, frame_kind

        what, why = self._obstacle(stock)
        if why is None:
            self.runs["gpurt"] += 1
            order = p2p.read_order(self._scheduler, stock.id)
            if isinstance(stock, p2p.ArrayRechunkSpec):
                return ArraySpec.replacing(stock, settings.shuffle, order, keeps_shards)
            assert isinstance(stock, p2p.DataFrameShuffleSpec)
            kind, rows = frame_kind(stock.meta), self._sketches.get(stock.id)
            return FrameSpec.replacing(stock, kind, settings.shuffle, rows, order, keeps_shards)
        if settings.strict:
            raise StrictFallbackError(
                f"{what} would run on stock Dask: {why}. Set gpurt.strict to false to allow that."
            )
        if not self.fallbacks[what, why]:
            logger.warning("%s runs on stock Dask: %s", what, why)
            if len(self.fallbacks) >= MAX_REASONS:  # many of them name a worker
                del self.fallbacks[next(iter(self.fallbacks))]
        self.fallbacks[what, why] += 1
        self.runs["stock"] += 1
        return stock

    def _obstacle(self, stock: p2p.ShuffleSpec[Any]) -> tuple[str, str | None]:
        from dask_gpurt.plugins.shuffle.frame_run import frame_kind, obstacle

        if isinstance(stock, p2p.ArrayRechunkSpec):
            return "array rechunk", self._readiness.obstacle()
        if isinstance(stock, p2p.DataFrameShuffleSpec):
            what = f"shuffle of {frame_kind(stock.meta)}"
            return what, obstacle(stock.meta) or self._readiness.obstacle()
        return f"shuffle of {type(stock).__name__}", "this kind of shuffle is not supported"

    async def sketch(self, shuffle_id: str, rows: list[int] | None = None) -> Any:
        """Handler: record how many rows of a sample go to each output partition.

        Without `rows`, return the column with the numbers of output partitions; None if not wanted.
        """
        request_checks.name("shuffle_id", shuffle_id)
        scheduler = self._scheduler
        if shuffle_id in p2p.active_shuffles(scheduler) or len(scheduler.workers) < 2:
            return None
        spec = p2p.stock_spec(scheduler, shuffle_id)
        if not isinstance(spec, p2p.DataFrameShuffleSpec):
            return None
        if rows is None:
            return spec.column
        self._sketches[shuffle_id] = request_checks.rows(rows, spec.npartitions)
        while len(self._sketches) > MAX_SKETCHES:
            self._sketches.popitem(last=False)
        return None

    def report(self) -> dict[str, Any]:
        """Return the numbers of runs by data plane, and the reasons for stock ones."""
        return {
            "runs": {"gpurt": self.runs["gpurt"], "stock": self.runs["stock"]},
            "fallbacks": [
                {"what": what, "why": why, "count": n} for (what, why), n in self.fallbacks.items()
            ],
        }
