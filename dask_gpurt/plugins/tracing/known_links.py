"""Links between the hosts of a trace, as far as the machines are described or reported."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import permutations
from typing import TYPE_CHECKING, Any

from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.plugins.tracing.worker_trace import WorkerTrace

if TYPE_CHECKING:
    from distributed import Scheduler

#: Most hosts whose links are looked up: for each two, a path is searched.
_MOST_HOSTS = 32


def known_links(
    scheduler: Scheduler, workers: Iterable[WorkerTrace]
) -> list[tuple[str, str, float]]:
    """Return source, target and bandwidth of the links between hosts of workers."""
    runtime: Any = scheduler.plugins.get(NAME)
    topology = runtime.machines.topology if runtime is not None else None
    if topology is None:
        return []
    nodes: dict[str, str] = {}
    for one in workers:
        if one.host not in nodes and len(nodes) < _MOST_HOSTS:
            node = topology.node_of(address=one.address, name=one.name, host=one.host)
            if node is not None:
                nodes[one.host] = node
    found = []
    for source, target in permutations(nodes, 2):
        path = topology.path(nodes[source], nodes[target])
        if path is not None and math.isfinite(path.bandwidth_nbytes_per_s):
            found.append((source, target, path.bandwidth_nbytes_per_s))
    return found
