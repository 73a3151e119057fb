"""Named time ranges for profilers, by lane and phase.

Nsight Systems and other NVIDIA tools show the ranges that a program marks through the `nvtx`
package. Without the package or without a listening tool, a range costs one test and does nothing.
The first range detects the tool, because tools attach before a program starts.

A range belongs to the thread that opened it, so code must not await inside a range. The ledger of
transfers records times without a profiler.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

DOMAIN = "dask_gpurt"

#: Distinct colours; other lanes get the tool's default.
_COLORS = {"compute": "green", "communication": "blue", "copy": "orange", "disk": "purple"}

_NOTHING = contextlib.nullcontext()


class _Range:
    """Context manager of one kind of range. It may be open many times and in several threads."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, lane: str, phase: str) -> None:
        self._domain = domain
        self._attributes = domain.get_event_attributes(
            message=f"{lane}: {phase}", color=_COLORS.get(lane), category=lane
        )

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *exception: object) -> None:
        self._domain.pop_range()


class Ranges:
    """The ranges of one domain.

    Parameters
    ----------
    domain
        A domain of the `nvtx` package, or None without a listening profiler.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._known: dict[tuple[str, str], _Range] = {}

    def open(self, lane: str, phase: str) -> AbstractContextManager[None]:
        """Return a context manager for a range over a `with` statement.

        Parameters
        ----------
        lane, phase
            The purpose of the work, and the step. Use few values: the names are never freed.
        """
        if self._domain is None:
            return _NOTHING
        key = (lane, phase)
        try:
            return self._known[key]
        except KeyError:
            return self._known.setdefault(key, _Range(self._domain, lane, phase))


def listening_domain() -> Any:
    """Return our domain if a profiler listens to it; None without a profiler or without `nvtx`."""
    try:
        import nvtx
    except ImportError:
        return None
    # Without a tool, or if NVTX_DISABLE is set, `nvtx` returns an object of another class.
    domain = nvtx.get_domain(DOMAIN) if nvtx.enabled() else None
    return domain if isinstance(domain, nvtx.Domain) else None


_ranges: Ranges | None = None


def range_(lane: str, phase: str) -> AbstractContextManager[None]:
    """Return a context manager for a range that a listening profiler shows.

    Examples
    --------
    >>> with range_("communication", "pack"):
    ...     pass
    """
    global _ranges
    if _ranges is None:
        _ranges = Ranges(listening_domain())
    return _ranges.open(lane, phase)
