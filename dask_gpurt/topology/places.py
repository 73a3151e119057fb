"""Places of workers, grouped so that paths between very many workers are cheap to look up. Pure.

A decision about a task with many inputs asks for the path from each holder to each candidate.
Candidates on similar hosts have the same paths from all other hosts. So a *place* has its own paths
from workers of its host, and shares the paths from elsewhere with all places of its *kind*. A
result computed for one candidate is valid for the next one of that kind.

`dask_gpurt.plugins.placement.cluster_links` makes places from a topology or from measurements.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from dask_gpurt.topology.model import Path


class Place(NamedTuple):
    """The place of a worker, and the paths to it, by source address.

    Attributes
    ----------
    kind
        Places of one kind share `far`.
    near, far
        Paths from workers of the same host, and from those of other hosts.
    """

    host: str
    kind: Hashable
    near: Mapping[str, Path]
    far: Mapping[str, Path]


#: Places by worker address.
Places = Mapping[str, Place]


def path_between(places: Places, source: str, target: str) -> Path:
    """Return the path from one worker to another, by address."""
    host, _, near, far = places[target]
    return (near if places[source].host == host else far)[source]
