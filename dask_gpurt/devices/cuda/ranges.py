"""Ranges of time that a profiler shows, named by lane and phase.

Nsight Systems and other tools of NVIDIA's draw what a program marks through the `nvtx` package.
Where that is not installed, or no tool listens, a range costs one test and does nothing. Whether
one listens is found out at the first range: tools are attached before a program starts.

A range belongs to the thread that opened it, so nothing may be awaited inside. What is kept for
ourselves, without a profiler, is in the ledger of transfers.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

DOMAIN = "dask_gpurt"

#: Told apart at a glance; other lanes have the tool's own colour.
_COLORS = {"compute": "green", "communication": "blue", "copy": "orange", "disk": "purple"}

_NOTHING = contextlib.nullcontext()


class _Range:
    """Opens and closes one kind of range; may be open many times, in one thread or in many."""

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
    """Ranges of one domain.

    Parameters
    ----------
    domain
        Of the `nvtx` package, or None if nobody listens.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._known: dict[tuple[str, str], _Range] = {}

    def open(self, lane: str, phase: str) -> AbstractContextManager[None]:
        """A range from here to the end of a `with` block.

        Parameters
        ----------
        lane, phase
            What work is for, and what is done. Of few values each: names are kept for ever.
        """
        if self._domain is None:
            return _NOTHING
        key = (lane, phase)
        try:
            return self._known[key]
        except KeyError:
            return self._known.setdefault(key, _Range(self._domain, lane, phase))


def listening_domain() -> Any:
    """The domain of ours that a profiler listens to; None if none does, or without `nvtx`."""
    try:
        import nvtx
    except ImportError:
        return None
    # Without a tool, or if NVTX_DISABLE is set, the package hands out another class.
    domain = nvtx.get_domain(DOMAIN) if nvtx.enabled() else None
    return domain if isinstance(domain, nvtx.Domain) else None


_ranges: Ranges | None = None


def range_(lane: str, phase: str) -> AbstractContextManager[None]:
    """A range from here to the end of a `with` block, for a profiler if one listens.

    Examples
    --------
    >>> with range_("communication", "pack"):
    ...     pass
    """
    global _ranges
    if _ranges is None:
        _ranges = Ranges(listening_domain())
    return _ranges.open(lane, phase)
