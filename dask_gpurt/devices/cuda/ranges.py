"""Named time ranges for profilers, with the names of the ledger: a lane, and a path.

Nsight Systems and other NVIDIA tools show the ranges that a program marks through the `nvtx`
package. Without the package or without a listening tool, a range costs one test and does nothing.
The first range detects the tool, because tools attach before a program starts.

There are two kinds. Ranges of a thread are nested, and tools show the work that they started on a
GPU. Code must not await inside of one. A range of the process may be open while its thread does
something else. The ledger records times without a profiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

DOMAIN = "dask_gpurt"

#: Distinct colours; other lanes get the tool's default.
_COLORS = {"compute": "green", "communication": "blue", "copy": "orange", "disk": "purple"}

_NOTHING = contextlib.nullcontext()


class _Range:
    """Context manager of one range of a thread. Several threads may have it open."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, attributes: Any) -> None:
        self._domain, self._attributes = domain, attributes

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
        self._attributes: dict[tuple[str, str], Any] = {}

    def open(self, lane: str, path: str) -> AbstractContextManager[None]:
        """Return a context manager for a range of this thread over a `with` statement.

        Parameters
        ----------
        lane, path
            As in the ledger. Use few values: the names are never freed.
        """
        if self._domain is None:
            return _NOTHING
        key = (lane, path)
        try:
            return self._known[key]
        except KeyError:
            return self._known.setdefault(key, _Range(self._domain, self._made(lane, path)))

    def open_in_process(self, lane: str, path: str) -> AbstractContextManager[None]:
        """Return a context manager for a range of this process, inside of which code may await."""
        return _NOTHING if self._domain is None else self._process_range(lane, path)

    @contextlib.contextmanager
    def _process_range(self, lane: str, path: str) -> Iterator[None]:
        number = self._domain.start_range(self._made(lane, path))
        try:
            yield
        finally:
            self._domain.end_range(number)

    def _made(self, lane: str, path: str) -> Any:
        key = (lane, path)
        if key not in self._attributes:
            self._attributes[key] = self._domain.get_event_attributes(
                message=range_name(lane, path), color=_COLORS.get(lane), category=lane
            )
        return self._attributes[key]


def range_name(lane: str, path: str) -> str:
    """Return the name of a range. Readers of traces take it apart again."""
    return f"{lane}: {path}"


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


def _of_this_process() -> Ranges:
    global _ranges
    if _ranges is None:
        _ranges = Ranges(listening_domain())
    return _ranges


def range_(lane: str, path: str) -> AbstractContextManager[None]:
    """Return a context manager for a range of this thread that a listening profiler shows.

    Examples
    --------
    >>> with range_("communication", "pack"):
    ...     pass
    """
    return _of_this_process().open(lane, path)


def process_range(lane: str, path: str) -> AbstractContextManager[None]:
    """Return a context manager for a range of this process. Code may await inside of it."""
    return _of_this_process().open_in_process(lane, path)
