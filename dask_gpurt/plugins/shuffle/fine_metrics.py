"""Dask's fine performance metrics of a run, under the labels of a stock run.

Spans and the scheduler's sums over all workers read them. Work inside a task is reported twice:
under the task (`execute`), which the dashboard draws, and under the shuffle (`p2p`, `foreground`).
Work behind tasks is reported under the shuffle alone. Stock Dask exports none of them to
Prometheus; `plugins.patches.shown.prometheus` exports those of shuffles. `metrics` has the
process-wide counters, and `shuffle.figures` the statistics of one run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Hashable, Iterator

from dask_gpurt.memory.decisions.levels import Value
from dask_gpurt.plugins.patches.p2p import context_meter
from dask_gpurt.shuffle.figures import RunFigures


class FineMetrics:
    """A reporter of one run's activities to the worker's digests.

    Parameters
    ----------
    digest
        `Worker.digest_metric`.
    span_id
        Span that the shuffle belongs to.
    """

    def __init__(self, digest: Callable[[Hashable, float], None], span_id: str | None) -> None:
        self._digest = digest
        self._span_id = span_id

    @contextlib.contextmanager
    def foreground(self) -> Iterator[None]:
        """Attribute metrics of the block to the current task and to the shuffle."""
        with context_meter.add_callback(self._reporter("foreground")):
            yield

    @contextlib.contextmanager
    def background(self, where: str, *, on_loop: bool) -> Iterator[None]:
        """Attribute metrics of the block to the shuffle alone.

        A coroutine or callback inherits the context of the task that caused it. Without this, it
        would add its seconds to a task that has long ended.

        Parameters
        ----------
        where
            `background-comms` or `background-disk`.
        on_loop
            Whether the block runs on the event loop. Calls that it offloads to threads then report
            on the loop.
        """
        with (
            context_meter.clear_callbacks(),
            context_meter.add_callback(self._reporter(where), allow_offload=on_loop),
        ):
            yield

    def _reporter(self, where: str) -> Callable[[Hashable, float, str], None]:
        def report(label: Hashable, value: float, unit: str) -> None:
            labels = label if isinstance(label, tuple) else (label,)
            first, *rest = labels
            if isinstance(first, str):
                first = first.removeprefix("p2p-")
            self._digest(("p2p", self._span_id, where, first, *rest, unit), value)

        return report


class RunClock:
    """The clocks of a run: `RunFigures` itself reads no clock."""

    def __init__(self, figures: RunFigures) -> None:
        self._figures = figures
        self._began_s, self._began_cpu_s = time.perf_counter(), time.process_time()

    def since(self, began: float) -> tuple[float, float]:
        """Note that the run did something now.

        Returns
        -------
        tuple
            Seconds since `began`, a time of `time.perf_counter`, and since the run began.
        """
        now = time.perf_counter()
        lasted_s = now - self._began_s
        self._figures.still_runs(lasted_s, time.process_time() - self._began_cpu_s)
        return now - began, lasted_s

    @contextlib.contextmanager
    def waiting_for_disk(self) -> Iterator[None]:
        """Count the seconds of a block in which a task or a message waits for the disk."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._figures.waited_for_disk(time.perf_counter() - began)


def amount(label: str, nbytes: int, count: int = 1) -> None:
    """Add a number of bytes and a number of items to the metrics of the current context."""
    context_meter.digest_metric(label, nbytes, "bytes")
    context_meter.digest_metric(label, count, "count")


def read_inputs(label: str, values: Collection[Value]) -> None:
    """Add the `amount` of the inputs that a task reads from one place."""
    if values:
        amount(label, sum(value.nbytes for value in values), len(values))


def left_host(raw_nbytes: int, wire_nbytes: int) -> None:
    """Add the `amount` of a message before and after encoding; skip messages inside a host.

    Each message is reported once, however often it was sent. The ratio of the two is the gain of
    the codecs. Stock Dask reports seconds under the same labels.
    """
    if wire_nbytes:
        amount("compress", raw_nbytes)
        amount("send", wire_nbytes)
