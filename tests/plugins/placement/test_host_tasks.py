"""Root tasks that need no GPU leave the workers with one alone, as long as others are free."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from distributed import Event, Worker
from distributed.utils_test import async_poll_for, gen_cluster

from dask_gpurt.plugins.placement.placer import Placement

GPU = {"GPU": 1}


def made(i):
    return i


def held(i, gate):
    gate.wait()
    return i


async def with_gpus(s, stack, n):
    """Start workers with a GPU, and return placement with their addresses."""
    placement = Placement(s, "data-aware")
    gpus = [
        await stack.enter_async_context(Worker(s.address, nthreads=2, resources=GPU))
        for _ in range(n)
    ]
    for one in gpus:
        placement.add_worker(s.workers[one.address])
    return {one.address for one in gpus}


async def places(c, s, n, gate):
    """Submit tasks of the kind `block` that wait, and return the number at each worker."""
    known = c.submit(made, 0, key=("block-0", 0))
    await known
    blocks = [c.submit(held, i, gate, key=("block-1", i)) for i in range(n)]
    keys = [one.key for one in blocks]
    await async_poll_for(lambda: all(key in s.tasks for key in keys), timeout=60)
    await async_poll_for(lambda: all(s.tasks[key].processing_on for key in keys), timeout=60)
    at = Counter(s.tasks[key].processing_on.address for key in keys)
    await gate.set()
    await c.gather(blocks)
    return at


@gen_cluster(client=True, nthreads=[("", 2)] * 2)
async def test_host_tasks_go_to_workers_without_a_gpu(c, s, *hosts):
    async with contextlib.AsyncExitStack() as stack:
        await with_gpus(s, stack, 2)
        at = await places(c, s, 4, Event())
        assert at == {one.address: 2 for one in hosts}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_no_worker_with_a_gpu_stays_idle(c, s, host):
    async with contextlib.AsyncExitStack() as stack:
        gpus = await with_gpus(s, stack, 2)
        at = await places(c, s, 5, Event())
        assert at == {host.address: 1, **dict.fromkeys(gpus, 2)}


@pytest.mark.parametrize("kind", ["block", "later"])
def test_tasks_near_gpu_data_are_placed_as_before(kind):
    """Either the results themselves are on a GPU, or the tasks that need them make such results."""

    @gen_cluster(client=True, nthreads=[("", 2)] * 2)
    async def test(c, s, *hosts):
        async with contextlib.AsyncExitStack() as stack:
            gpus = await with_gpus(s, stack, 2)
            gate = Event()
            first = c.submit(made, 0, key=("block-0", 0))
            later = c.submit(made, first, key=("later-0", 0))
            await later
            for one in (first, later):
                if s.tasks[one.key].prefix.name == kind:
                    s.tasks[one.key].group.add_type("cupy.ndarray")
            keys = [("block-1", i) for i in range(4)]
            # One graph, so the scheduler knows what needs a block when it places the block.
            graph = {key: (held, i, gate) for i, key in enumerate(keys)}
            graph |= {("later-1", i): (made, key) for i, key in enumerate(keys)}
            both = c.get(graph, [("later-1", i) for i in range(4)], sync=False)
            await async_poll_for(lambda: all(key in s.tasks for key in keys), timeout=60)
            await async_poll_for(lambda: all(s.tasks[k].processing_on for k in keys), timeout=60)
            at = {s.tasks[key].processing_on.address for key in keys}
            await gate.set()
            await c.gather(both)
            assert at & gpus

    test()
