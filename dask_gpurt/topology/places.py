"""Where workers are, such that ways between very many of them can be weighed quickly. Pure.

A decision about a task with many inputs asks for the way from each holder to each candidate. But
candidates on alike hosts are reached alike from all other hosts: a *place* says which way it is
from the workers of its own host, and shares with all places of its *kind* the ways from elsewhere.
So what is worked out for one candidate holds for the next one of that kind.

Made from a topology, or from what was measured, by `dask_gpurt.plugins.placement.cluster_links`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from dask_gpurt.topology.model import Path


class Place(NamedTuple):
    """Of a worker: where it is, and the ways to it, by the addresses they come from.

    Attributes
    ----------
    kind
        `far` is the same for all places of a kind.
    near, far
        Ways from workers of the same host, and of others.
    """

    host: str
    kind: Hashable
    near: Mapping[str, Path]
    far: Mapping[str, Path]


#: By the address of a worker.
Places = Mapping[str, Place]


def way(places: Places, source: str, target: str) -> Path:
    """The way from one worker to another, by address."""
    host, _, near, far = places[target]
    return (near if places[source].host == host else far)[source]
