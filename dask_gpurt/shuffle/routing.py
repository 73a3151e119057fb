"""Routes of shards in two steps: to a worker of the other host, and from there inside the host.

With n workers on each of two hosts, every pair of workers would exchange messages: n * n links, and
each carries a small part. In two steps, a worker sends all that is for another host to one worker
there. That *relay* hands the shards on through the host's shared memory. So there are n links, with
messages n times as large. `plugins.shuffle.relay` does the forwarding. This module is pure.

Workers that wait for each other cannot form a cycle. A relay answers a message once the workers of
its own host have taken the shards. These take shards from inside their host without sending
anything. So waits lead from senders to relays and from relays to receivers, and end there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

#: With `auto`, clusters up to this size send directly: few links cost little, and a detour a copy.
MOST_DIRECT = 64
#: With `auto`, hosts have at least this many workers on average. Fewer save too few links.
LEAST_ON_HOST = 4


class Routing:
    """The next worker on the way to each worker of a run.

    Parameters
    ----------
    me
        Address of this worker.
    workers
        Addresses of all workers of the run. All pass the same ones.
    routing
        `auto` chooses by the numbers of workers and hosts.
    """

    def __init__(
        self, me: str, workers: Iterable[str], routing: Literal["auto", "direct", "two-level"]
    ) -> None:
        on_host: dict[str, list[str]] = {}
        for address in sorted({me, *workers}):
            on_host.setdefault(host_of(address), []).append(address)
        self._on_host = on_host
        self._host = host_of(me)
        self._rank_on_host = on_host[self._host].index(me)
        n_workers = sum(map(len, on_host.values()))
        is_large = n_workers > MOST_DIRECT and n_workers >= LEAST_ON_HOST * len(on_host)
        self.is_two_level = routing == "two-level" or (routing == "auto" and is_large)

    def hop(self, target: str) -> str:
        """Return the worker to send to for a target: itself, or a relay on its host."""
        host = host_of(target)
        if not self.is_two_level or host == self._host or host not in self._on_host:
            return target
        # Workers of equal rank exchange messages, so each has one link to each other host.
        there = self._on_host[host]
        return there[self._rank_on_host % len(there)]


def host_of(address: str) -> str:
    """Return the part of a worker's address that names its host."""
    return address.rpartition(":")[0]
