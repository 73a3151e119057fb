"""Collective operations: the parts of a value that each rank sends, to whom, and in which order.

*Ranks* are the members of a group, numbered from 0. Every rank has a value of the same shape and
type. Operations combine these values, or copy one of them to all ranks. An algorithm cuts values
into slices, and is a list of steps for each rank.

- `steps`: what a step is.
- `schedules`: algorithms that treat all ranks alike. `two_level` knows which ranks share a host.
- `plans`: the steps of a rank, by the name of an algorithm.
- `choice`: the cost of each algorithm on given links, and the cheapest one.
- `reduction`: adding up slices in memory.
- `sliced_trees`: which levels of a reduction of Dask's combine slices. `slicing` cuts and combines.

Apart from that memory, this room is pure. `plugins` run the steps on workers. Their `Communicator`
has its name here for programs, and is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_gpurt.plugins.collectives.groups.communicator import Communicator as Communicator

__all__ = ["Communicator"]


def __getattr__(name: str) -> Any:
    if name != "Communicator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dask_gpurt.plugins.collectives.groups.communicator import Communicator

    return Communicator
