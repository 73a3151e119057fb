"""The load of each host's own link: bytes sent to other hosts and received from them.

Pairs of hosts share the link of a host. While three hosts send to one, each pair has a third of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dask_gpurt.tracing.report.busy_time import busy_by_group
from dask_gpurt.tracing.report.event_columns import Columns
from dask_gpurt.tracing.report.transfer_rows import rate_of

INTO, OUT_OF = "into", "out of"


class HostRow(NamedTuple):
    """All bytes between a host and others, in one direction.

    Attributes
    ----------
    direction
        `INTO` or `OUT_OF`.
    peers
        The other hosts.
    busy_s
        Seconds in which at least one transfer went on.
    rate
        Bytes a second while busy.
    """

    host: str
    direction: str
    peers: tuple[str, ...]
    nbytes: float
    busy_s: float
    rate: float

    @property
    def name(self) -> str:
        return f"{self.direction} {self.host}"

    @property
    def links(self) -> list[str]:
        """Return the names of the pairs of hosts that use it, as transfers have them."""
        if self.direction == INTO:
            return [f"{peer} to {self.host}" for peer in self.peers]
        return [f"{self.host} to {peer}" for peer in self.peers]


def host_rows(columns: Columns) -> list[HostRow]:
    """Return two rows for each host that exchanged bytes with others, busiest first."""
    hops, rows = columns.hops, []
    between = np.flatnonzero((hops.source != hops.target) & (hops.nbytes > 0))
    n = len(hops.hosts)
    for direction, ends, others in (
        (OUT_OF, hops.source[between], hops.target[between]),
        (INTO, hops.target[between], hops.source[between]),
    ):
        nbytes = np.bincount(ends, hops.nbytes[between], minlength=n)
        busy_s = busy_by_group(ends, hops.start_s[between], hops.wire_end_s[between], n)
        pairs = np.unique(np.stack([ends, others], axis=1), axis=0)
        for host in np.flatnonzero(busy_s > 0).tolist():
            peers = tuple(hops.hosts[i] for i in pairs[pairs[:, 0] == host, 1].tolist())
            rate = rate_of(nbytes[host], busy_s[host])
            rows.append(
                HostRow(
                    *(hops.hosts[host], direction, peers),
                    *(float(nbytes[host]), float(busy_s[host]), rate),
                )
            )
    return sorted(rows, key=lambda row: -row.busy_s)
