"""Shows Prometheus what a worker's shuffles did: bytes, how many things they were, and seconds.

Stock counts them among its fine performance metrics, and shows Prometheus none of those but the
ones of its spill buffer. Shuffles are shown here as that is: a family for each unit, with a label
for the activity, of the sums that the worker has since it started. Runs on stock's data plane are
among them, since they are told under the same names.

| what | why |
|---|---|
| `distributed.http.prometheus.PrometheusCollector` | begins the names of families as stock's do |
| `Server.digests_total` | the sums |

What is shown belongs to the process, as stock's registry does. It is shown from the first of its
workers that asks until the last has let go (`ShownShuffles.end`), all of them together.
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

#: Unit of a fine performance metric to the end of its family's name, and what it is.
FAMILIES: dict[str, tuple[str, str]] = {
    "bytes": ("shuffle_bytes", "Bytes that shuffles handled, by what was done with them"),
    "count": ("shuffle_count", "How often it was done"),
    "seconds": ("shuffle_time_seconds", "How long it took, over all threads and the event loop"),
}


class _Collector(PrometheusCollector):
    """Of all workers of the process that want their shuffles shown."""

    def __init__(self, workers: WeakSet[Worker]) -> None:
        super().__init__(None)  # type: ignore[no-untyped-call]
        self.subsystem = "worker"
        self._workers = workers

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        sums: dict[str, defaultdict[tuple[str, str], float]] = {
            unit: defaultdict(float) for unit in FAMILIES
        }
        with _lock:  # workers come and go while another thread asks
            workers = tuple(self._workers)
        for worker in workers:
            # A copy, made at once: tasks go on in other threads, and tell of what they do.
            for name, value in dict(worker.digests_total).items():
                if isinstance(name, tuple) and name[0] == "p2p":
                    # Of which span it was would be a series for every computation.
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


#: Of one thread's as often as it likes: to register a collector is to ask it.
_lock = threading.RLock()
_workers: WeakSet[Worker] = WeakSet()
_collector: _Collector | None = None


class ShownShuffles:
    """One worker's wish that its shuffles are in Prometheus; nothing where that is not installed.

    Until `end` is called, once or more often, or the worker is gone.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        global _collector
        with _lock:
            _workers.add(worker)
            if _collector is None:
                _collector = _registered()

    def end(self) -> None:
        """Leave Prometheus as stock has it."""
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
        logger.info("shuffles are not shown to Prometheus: %s", error)
        return None
    return found
