"""Clusters in this process for tests of communicators, and functions that force an algorithm."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from distributed.utils_test import gen_cluster

from dask_gpurt.collectives.choice import RankGroup
from dask_gpurt.plugins.worker.worker_runtime import runtime_of

#: Three addresses of this machine stand for three hosts.
HOSTS = [("127.0.0.1", 1)] * 2 + [("127.0.0.2", 1)] * 2 + [("127.0.0.3", 1)]
CONFIG = {
    "gpurt.enabled": True,
    "distributed.scheduler.active-memory-manager.start": False,
}
ALGORITHMS = {
    "all_reduce": ["one-shot", "two-shot", "ring", "tree", "two-level"],
    "reduce_scatter": ["direct", "ring"],
    "all_gather": ["direct", "ring"],
    "broadcast": ["chain", "tree", "two-shot"],
}
EACH = [(name, one) for name, several in ALGORITHMS.items() for one in several]


def on_cluster(nthreads=HOSTS, **settings):
    return gen_cluster(client=True, nthreads=nthreads, config={**CONFIG, **settings})


@contextlib.contextmanager
def forced(collective: str, algorithm: str) -> Iterator[None]:
    """Let an algorithm be the cheapest one, whatever it costs."""
    compare = getattr(RankGroup, collective)

    def first(group, nbytes, costs):
        found = compare(group, nbytes, costs)
        return sorted(found, key=lambda one: one.algorithm != algorithm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankGroup, collective, first)
        yield


async def assert_nothing_stays(c, s, *workers):
    """No group, lock, plugin or memory of an operation is left."""
    gangs = s.plugins["gpurt"].collectives.gangs
    runtimes = [runtime_of(worker) for worker in workers]

    def is_something_there():
        members = [runtime.groups._members for runtime in runtimes]
        keys = [key for key in s.tasks if str(key).startswith("gpurt-rank")]
        return gangs._gangs or keys or any(members)

    def is_memory_held():
        gc.collect()  # errors of futures refer to the frames that awaited them
        return any(
            runtime.links.outgoing.used_nbytes or runtime.pool.used_nbytes for runtime in runtimes
        )

    # A thread of a rank may be about to return, and a message about to be dropped.
    while is_something_there() or is_memory_held():
        await c.run_on_scheduler(lambda: None)
    assert not gangs._of_key
    assert "gpurt-gangs" not in s.plugins
    assert not s.extensions["multi_locks"].requests
