"""A worker to which the runtime cannot be attached stays a stock worker."""

from __future__ import annotations

import threading

import pytest
from distributed import wait
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.plugins.patches import worker_memory
from dask_gpurt.plugins.worker import attachment

#: Each makes a hook, in this order.
HOOKS = [
    "RunLookup",
    "ManagedMemory",
    "WorkerGlance",
    "weak_handlers",
    "ShortTurns",
    "ValueTransfers",
    "ShownShuffles",
    "CountedShards",
    "WholeClose",
    "GcFreeze",
]


class NoThreadError(Exception):
    pass


def fail(*args, **kwargs):
    raise NoThreadError("can't start new thread")


def gpurt_threads():
    """Return the names of the threads that move values."""
    names = [one.name for one in threading.enumerate()]
    return sorted(name for name in names if name.startswith(("gpurt write", "gpurt read")))


def state_of(worker):
    """Return all that hooks change on a worker."""
    shuffle = worker.plugins["shuffle"]
    return {
        "attributes": {name: vars(worker)[name] for name in vars(worker).keys() - {"_protocol"}},
        "store": worker.data,
        "handlers": dict(worker.handlers),
        "streams": dict(worker.stream_handlers),
        "extensions": dict(worker.extensions),
        "callbacks": set(worker.periodic_callbacks),
        "execute": worker.execute,
        "get_data": worker.get_data,
        "close": worker.close,
        "shuffle": {"plugin": dict(vars(shuffle)), "runs": dict(vars(shuffle.shuffle_runs))},
        "memory": dict(vars(worker.memory_manager)),
    }


@pytest.mark.parametrize("failing", HOOKS)
@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"memory_limit": "2 GiB"})
async def test_a_failure_undoes_the_hooks_before_it(c, s, a, failing):
    kept = c.submit(bytes, 10)
    await kept
    # The first attachment makes what stays: the runtime of this worker.
    await dask_gpurt.enable(c)
    await dask_gpurt.disable(c)
    before = state_of(a)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attachment, failing, fail)
        await dask_gpurt.enable(c)
    after = state_of(a)
    assert {name for name in before if before[name] != after[name]} == set()
    problem = (await dask_gpurt.status(c))["not_ready"][a.address]
    assert "NoThreadError" in problem and "can't start new thread" in problem
    assert await c.submit(len, kept) == 10
    # Nothing that the failure left behind is in the way of the next attachment.
    await dask_gpurt.disable(c)
    await dask_gpurt.enable(c)
    assert [*(await dask_gpurt.status(c))["ready"]] == [a.address]
    assert await c.submit(len, kept, pure=False) == 10


@pytest.mark.parametrize("failing", [(TieredStore, "adopt"), (worker_memory, "StoreSwap")])
@gen_cluster(client=True, nthreads=[("", 1)], worker_kwargs={"memory_limit": "2 GiB"})
async def test_a_failed_takeover_leaves_all_values(c, s, a, failing):
    kept = [c.submit(bytes, n, key=f"kept-{n}") for n in (10, 1000)]
    await wait(kept)
    a.data.evict()
    assert len(a.data.slow) == 1
    before, threads = state_of(a), gpurt_threads()
    queue = type(a.state.ready)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*failing, fail)
        await dask_gpurt.enable(c)
    assert "NoThreadError" in (await dask_gpurt.status(c))["not_ready"][a.address]
    assert a.data is before["store"] and sorted(a.data) == ["kept-10", "kept-1000"]
    assert await c.gather(c.map(len, kept)) == [10, 1000]
    assert (type(a.state.ready), gpurt_threads()) == (queue, threads)
