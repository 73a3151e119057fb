"""What Dask's fine performance metrics are told of a run: the labels that a stock run has.

Spans read them, and the scheduler's sums of all workers. What happens inside a task is told twice,
under the task (`execute`), which is what the dashboard draws, and under the shuffle (`p2p`,
`foreground`); what happens behind tasks under the shuffle alone. To Prometheus stock shows none of
them, and `plugins.patches.prometheus` those of shuffles. The process-wide counters are `metrics`,
figures of one run `shuffle.figures`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator

from dask_gpurt.plugins.patches.p2p import context_meter


class FineMetrics:
    """Tells a worker's digests what one run does.

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
        """Whatever is metered inside belongs to the current task and to the shuffle."""
        with context_meter.add_callback(self._teller("foreground")):
            yield

    @contextlib.contextmanager
    def background(self, where: str, *, on_loop: bool) -> Iterator[None]:
        """Whatever is metered inside belongs to the shuffle alone.

        A coroutine or callback inherits the context of the task that caused it, and would add its
        seconds to a task that has long ended.

        Parameters
        ----------
        where
            `background-comms` or `background-disk`.
        on_loop
            On the event loop; what is offloaded to threads from there is told on the loop.
        """
        with (
            context_meter.clear_callbacks(),
            context_meter.add_callback(self._teller(where), allow_offload=on_loop),
        ):
            yield

    def _teller(self, where: str) -> Callable[[Hashable, float, str], None]:
        def tell(label: Hashable, value: float, unit: str) -> None:
            labels = label if isinstance(label, tuple) else (label,)
            first, *rest = labels
            if isinstance(first, str):
                first = first.removeprefix("p2p-")
            self._digest(("p2p", self._span_id, where, first, *rest, unit), value)

        return tell


def amount(label: str, nbytes: int, count: int = 1) -> None:
    """Add bytes, and how many things they are, to the metrics of the current context."""
    context_meter.digest_metric(label, nbytes, "bytes")
    context_meter.digest_metric(label, count, "count")


def left_host(raw_nbytes: int, wire_nbytes: int) -> None:
    """`amount` of a message before and after it was encoded; nothing if it stayed on its host.

    Told once for a message, however often it was sent: the first over the second is what codecs
    are worth. They are amounts of what stock has seconds of.
    """
    if wire_nbytes:
        amount("compress", raw_nbytes)
        amount("send", wire_nbytes)


def disk_io(label: str, nbytes: int) -> None:
    """`amount` of a shard written (`disk-write`) or read back (`p2p-disk-read`)."""
    amount(label, nbytes)
    if label == "disk-write":
        amount("process", nbytes)
