"""Instants of a trace by name, such as evictions, and the kernels of GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dask_gpurt.tracing.events import Instant


class Happening(NamedTuple):
    """All instants of one name: evictions, restarts, lost workers."""

    name: str
    n_times: int
    first_s: float
    last_s: float
    detail: str


class KernelRow(NamedTuple):
    """A kernel of a GPU, over all of its launches."""

    device: str
    name: str
    n_launches: int
    busy_s: float


def happenings(instants: Iterable[Instant]) -> list[Happening]:
    """Return the names of instants, the rarest first: they are the ones to look at."""
    found: dict[str, list[Instant]] = {}
    for one in instants:
        found.setdefault(one.name, []).append(one)
    rows = [
        Happening(name, len(all_), all_[0].at_s, all_[-1].at_s, all_[0].detail)
        for name, all_ in found.items()
    ]
    return sorted(rows, key=lambda row: (row.n_times, row.first_s))


def kernel_rows(about: dict[str, Any]) -> list[KernelRow]:
    """Return the kernels that a foreign trace summed up, the busiest first."""
    rows = []
    sums = about.get("kernels")
    for one in sums if isinstance(sums, list) else []:
        # The file may come from anybody.
        match one:
            case [str(device), str(name), int(count), int() | float() as busy_s]:
                rows.append(KernelRow(device, name, count, float(busy_s)))
    return sorted(rows, key=lambda row: -row.busy_s)
