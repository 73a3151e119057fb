"""Prometheus metrics of a worker's shuffles: bytes, counts and seconds.

Stock Dask counts them among its fine performance metrics, but exports only those of its spill
buffer. This module exports the metrics of shuffles in the same way. There is one family for each
unit, with a label for the activity, summed since the worker started. Runs on stock's data plane are
included, because they report under the same names. Two families and a histogram of our own have
the bytes, seconds and sizes of the messages that our data plane sent.

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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distributed.http.prometheus import PrometheusCollector

from dask_gpurt.process_patch import ProcessPatch
from dask_gpurt.shuffle.traffic import MESSAGE_NBYTES, SentSum, SentTotals

if TYPE_CHECKING:
    from distributed import Worker

logger = logging.getLogger("dask_gpurt")

#: By unit of a fine performance metric: the suffix of its family's name, and its help text.
FAMILIES: dict[str, tuple[str, str]] = {
    "bytes": ("shuffle_bytes", "Bytes that shuffles handled, by activity"),
    "count": ("shuffle_count", "Number of operations of shuffles, by activity"),
    "seconds": (
        "shuffle_time_seconds",
        "Seconds over all threads and the event loop, by activity",
    ),
}


#: Help texts of the families of our data plane, by name. The order is: bytes, seconds, sizes.
SENT: dict[str, str] = {
    "gpurt_sent_bytes": "Bytes of shuffle messages, by path and kind of peer",
    "gpurt_send_seconds": "Seconds from sending shuffle messages until their answers",
    "gpurt_message_bytes": "Sizes of shuffle messages",
}


class _Collector(PrometheusCollector):
    """A collector for all workers of the process that export their shuffles."""

    def __init__(self, workers: WeakKeyDictionary[Worker, SentTotals]) -> None:
        super().__init__(None)  # type: ignore[no-untyped-call]
        self.subsystem = "worker"
        self._workers = workers

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        sums: dict[str, defaultdict[tuple[str, str], float]] = {
            unit: defaultdict(float) for unit in FAMILIES
        }
        with _lock:  # workers come and go in other threads
            workers = dict(self._workers)
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
        yield from self._sent(workers.values())

    def _sent(self, totals: Iterable[SentTotals]) -> Iterator[Any]:
        """Yield what was sent, by the path of the bytes and the kind of the peer."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        sums: defaultdict[tuple[str, str], SentSum] = defaultdict(SentSum)
        for one in totals:
            for labels, sent in one.snapshot().items():
                into = sums[labels]
                into.nbytes += sent.nbytes
                into.seconds += sent.seconds
                into.of_size = list(map(add, into.of_size, sent.of_size))
        names = [self.build_name(name) for name in SENT]  # type: ignore[no-untyped-call]
        helps = SENT.values()
        nbytes, seconds = (
            CounterMetricFamily(name, text, labels=["path", "peer"])
            for name, text in list(zip(names, helps, strict=True))[:2]
        )
        sizes = HistogramMetricFamily(names[2], [*helps][2], labels=["path", "peer"])
        ends = [*map(str, map(float, MESSAGE_NBYTES)), "+Inf"]
        for labels, sent in sums.items():
            nbytes.add_metric(labels, sent.nbytes)
            seconds.add_metric(labels, sent.seconds)
            counts = list(zip(ends, accumulate(sent.of_size), strict=True))
            sizes.add_metric(labels, buckets=counts, sum_value=sent.nbytes)
        yield from (nbytes, seconds, sizes)


_lock = threading.Lock()
_workers: WeakKeyDictionary[Worker, SentTotals] = WeakKeyDictionary()


def _register() -> Callable[[], None]:
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return lambda: None
    found = _Collector(_workers)
    try:
        REGISTRY.register(found)
    except ValueError as error:
        logger.info("cannot export shuffle metrics to Prometheus: %s", error)
        return lambda: None
    return partial(REGISTRY.unregister, found)


_patch = ProcessPatch(_register)


class ShownShuffles:
    """One worker's request to export its shuffles; does nothing without `prometheus_client`.

    Holds until `uninstall` is called or the worker is garbage collected. Repeated calls do nothing.

    Parameters
    ----------
    sent
        What the worker's data plane sends.
    """

    def __init__(self, worker: Worker, sent: SentTotals) -> None:
        self._worker = worker
        with _lock:
            _workers[worker] = sent
        self._release = _patch.hold(worker)

    def uninstall(self) -> None:
        """Stop exporting this worker's shuffles."""
        with _lock:
            _workers.pop(self._worker, None)
        self._release()
