"""Kernels and copies of this process, as CUPTI sees them. Not yet run on a GPU.

CUPTI is NVIDIA's interface for profilers; the package `cupti-python` offers it in a running
process. One profiler at a time can use it, so nsys around the worker excludes it. Without the
package, the trace has the ledger's entries alone. So it does without a GPU or the permission, and a
warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from dask_gpurt.devices.ledger import LedgerEntry
from dask_gpurt.tracing.clocks import clock_later_s
from dask_gpurt.tracing.nsight.nsys import copy_path

logger = logging.getLogger("dask_gpurt")

#: Numbers of kinds of activities.
_COPY, _SET, _KERNEL, _CONCURRENT_KERNEL, _PEER_COPY = 1, 2, 3, 10, 22
_KINDS = (_CONCURRENT_KERNEL, _COPY, _PEER_COPY, _SET)
#: CUPTI fills one buffer after the other.
_BUFFER_NBYTES = 8 << 20
#: How often the two clocks are compared.
_N_COMPARISONS = 16


def entry_of(activity: Any, later_s: float) -> LedgerEntry | None:
    """Return the entry of an activity; None for kinds that are not recorded.

    Parameters
    ----------
    activity
        A record of CUPTI. Its times are in nanoseconds.
    later_s
        The ledger's clock less the clock of CUPTI.
    """
    # A record whose work has not ended, or whose times were lost.
    if not activity.start or activity.end < activity.start:
        return None
    nbytes, way = 0, ""
    if activity.kind in (_KERNEL, _CONCURRENT_KERNEL):
        path = activity.name or "a kernel"
    elif activity.kind in (_COPY, _PEER_COPY):
        # CUPTI counts kinds of memory from 1, and exports of nsys from 0.
        path, way = copy_path(activity.copy_kind, activity.src_kind - 1, activity.dst_kind - 1)
        nbytes = activity.bytes
    elif activity.kind == _SET:
        path, nbytes = "memset", activity.bytes
    else:
        return None
    lane = f"GPU {activity.device_id} stream {activity.stream_id}"
    start_s, end_s = (time_ns / 1e9 + later_s for time_ns in (activity.start, activity.end))
    return LedgerEntry(lane, path, nbytes, start_s, end_s, way=way)


class CuptiRecorder:
    """Records the work of GPUs between `start` and `stop`.

    Parameters
    ----------
    record
        Gets each entry, in a thread of CUPTI.
    clock
        The ledger's clock.
    """

    def __init__(self, record: Callable[[LedgerEntry], None], clock: Callable[[], float]) -> None:
        self._record, self._clock = record, clock
        self._cupti: Any = None
        self._enabled: list[int] = []
        self._later_s = 0.0

    def start(self) -> bool:
        """Begin to record. Return whether that was possible; a warning says why not."""
        try:
            from cupti import cupti
        except ModuleNotFoundError:
            return False
        except ImportError as error:
            logger.warning("the trace has no kernels: cupti-python cannot be loaded (%s)", error)
            return False
        try:
            self._later_s = clock_later_s(
                self._clock, lambda: cupti.get_timestamp() / 1e9, _N_COMPARISONS
            )
            cupti.activity_register_callbacks(lambda: (_BUFFER_NBYTES, 0), self._add)
            self._cupti = cupti
            for kind in _KINDS:
                cupti.activity_enable(kind)
                self._enabled.append(kind)
        # No GPU, no permission, or another profiler: CUPTI has a class of errors for each.
        except Exception as error:
            logger.warning("the trace has no kernels: CUPTI refuses (%s)", _reason(error))
            self.stop()
            return False
        return True

    def stop(self) -> None:
        """End to record. All work that has ended is recorded then."""
        if (cupti := self._cupti) is None:
            return
        self._cupti = None
        if self._enabled:
            while self._enabled:
                cupti.activity_disable(self._enabled.pop())
            cupti.activity_flush_all(1)

    def _add(self, activities: Iterable[Any]) -> None:
        for activity in activities:
            if (entry := entry_of(activity, self._later_s)) is not None:
                self._record(entry)


def _reason(error: Exception) -> str:
    if "MULTIPLE_SUBSCRIBERS" in str(error):
        return "another profiler, such as nsys, already uses it in this process"
    return str(error)
