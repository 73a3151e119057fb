"""Prometheus metrics of a worker's shuffles: bytes, counts and seconds.

Stock Dask counts them among its fine performance metrics, of which it exports only those of its
spill buffer. This module exports those of shuffles in the same manner: one family for each unit,
with a label for the activity, summed since the worker started. Runs on stock's data plane are
included, because they report under the same names.

| what | why | taken back by |
|---|---|---|
| `distributed.http.prometheus.PrometheusCollector` | builds family names as stock's do |
`ShownShuffles.uninstall` |
| `Server.digests_total` | holds the sums | |

The collector is global to the process, as stock's registry is. It covers all workers of the process
that asked for it. The first one registers it, and the last one to call `ShownShuffles.uninstall`
removes it.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from distributed.http.prometheus import PrometheusCollector

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")

#: Unit of a fine performance metric to the suffix of its family's name, and its help text.
FAMILIES: dict[str, tuple[str, str]] = {
    "bytes": ("shuffle_bytes", "Bytes that shuffles handled, by activity"),
    "count": ("shuffle_count", "Number of operations of shuffles, by activity"),
    "seconds": (
        "shuffle_time_seconds",
        "Seconds over all threads and the event loop, by activity",
    ),
}


class _Collector(PrometheusCollector):
    """A collector for all workers of the process that export their shuffles."""

    def __init__(self, workers: WeakSet[Worker]) -> None:
        super().__init__(None)  # type: ignore[no-untyped-call]
        self.subsystem = "worker"
        self._workers = workers

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        sums: dict[str, defaultdict[tuple[str, str], float]] = {
            unit: defaultdict(float) for unit in FAMILIES
        }
        with _lock:  # workers come and go in other threads
            workers = tuple(self._workers)
        for worker in workers:
            # Copy at once: tasks in other threads keep adding to it.
            for name, value in dict(worker.digests_total).items():
                if isinstance(name, tuple) and name[0] == "p2p":
                    # Drop the span: it would add one time series for every computation.
                    _, _, where, *label, unit = name
                    if unit in sums:
                        sums[unit][where, "-".join(map(str, label))] += value
        for unit, (name, meaning) in FAMILIES.items():
            family = CounterMetricFamily(
                self.build_name(name),  # type: ignore[no-untyped-call]
                meaning,
                labels=["where", "activity"],
            )
            for labels, value in sums[unit].items():
                family.add_metric(labels, value)
            yield family


#: Reentrant: registering a collector collects from it.
_lock = threading.RLock()
_workers: WeakSet[Worker] = WeakSet()
_collector: _Collector | None = None


class ShownShuffles:
    """One worker's request to export its shuffles; does nothing without `prometheus_client`.

    Holds until `uninstall` is called or the worker is garbage collected. Repeated calls do nothing.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        global _collector
        with _lock:
            _workers.add(worker)
            if _collector is None:
                _collector = _registered()

    def uninstall(self) -> None:
        """Stop exporting this worker's shuffles."""
        global _collector
        with _lock:
            _workers.discard(self._worker)
            if _collector is not None and not _workers:
                from prometheus_client import REGISTRY

                REGISTRY.unregister(_collector)
                _collector = None


def _registered() -> _Collector | None:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return None
    found = _Collector(_workers)
    try:
        REGISTRY.register(found)
    except ValueError as error:
        logger.info("cannot export shuffle metrics to Prometheus: %s", error)
        return None
    return found
