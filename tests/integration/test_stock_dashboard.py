"""Every page of distributed's dashboard works during a shuffle, a rechunk and a spill."""

from __future__ import annotations

import pytest
from distributed import wait
from distributed.utils_test import async_poll_for, gen_cluster
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from tests.integration.held_exchanges import (
    all_moved,
    all_say,
    beats,
    draw,
    held,
    rechunked,
    shuffled,
)
from tests.integration.memory_cluster import MANAGED_ALONE, MIB, block
from tests.thoroughness import only_if_all

pytest.importorskip("bokeh", reason="stock has no dashboard without it")

from bokeh.models import ColumnDataSource
from distributed.dashboard import scheduler as scheduler_pages
from distributed.dashboard import worker as worker_pages

#: Addresses that are not Bokeh's.
PLAIN = ("/health", "/metrics")
PLAIN_AT_SCHEDULER = ("/info/main/workers.html", "/json/counts.json")
WITH_DASHBOARD = {"dashboard": True, "dashboard_address": ":0"}
#: Dask's page of task groups fails if a group is gone on which others depend.
FAIL_ON_STOCK = {"/groups", "/individual-groups"}

two_workers = gen_cluster(
    client=True,
    nthreads=[("", 2)] * 2,
    timeout=120,
    config={"gpurt.shuffle.memory": "16 KiB"},
    scheduler_kwargs=WITH_DASHBOARD,
    worker_kwargs=WITH_DASHBOARD,
)


async def ask_for(server, routes):
    """Answer requests like those of a browser."""
    for route in routes:
        answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{server.http_server.port}{route}")
        assert answer.code == 200


def everything(s, workers):
    """Return the scheduler's pages, and the kinds of errors of all pages that fail."""
    pages, failed = draw(scheduler_pages.applications, s, scheduler_pages.template_variables(s))
    for worker in workers:
        failed |= draw(worker_pages.applications, worker, worker_pages.template_variables)[1]
    return pages, failed


def drawn(page, field):
    """Return the data of the source of a page that has this field."""
    sources = page.select({"type": ColumnDataSource})
    (found,) = (one.data for one in sources if field in one.data)
    return found


async def during(c, s, workers, outputs, has_moved):
    """Return heartbeats and `everything` while an exchange waits for its last input partition."""
    async with held(c, s, outputs, has_moved):
        known = beats(s)
        found = everything(s, workers)
        assert beats(s) == known  # no heartbeat came meanwhile
        await ask_for(s, [*PLAIN, *PLAIN_AT_SCHEDULER, "/shuffle"])
        await ask_for(workers[0], [*PLAIN, "/status"])
    return known, *found


async def check_exchange(c, s, workers, outputs):
    """Draw all pages during an exchange on stock Dask and on the runtime, and compare."""
    _, _, stock_failed = await during(c, s, workers, outputs(5), all_say)
    await dask_gpurt.enable(c)
    known, pages, failed = await during(c, s, workers, outputs(4), all_moved)
    assert (await dask_gpurt.status(c))["runs"] == {"gpurt": 1, "stock": 0}
    assert failed == stock_failed
    assert failed.keys() <= FAIL_ON_STOCK
    found = drawn(pages["/shuffle"], "comm_avg_size")
    assert sorted(found["worker"]) == sorted(worker.address for worker in workers)
    for prefix in ("comm", "disk"):
        for name in ("written", "avg_size", "avg_duration", "memory_limit"):
            assert sum(found[f"{prefix}_{name}"]) > 0, (prefix, name)
        for worker, beat in known.items():
            at = found["worker"].index(worker)
            assert found[f"{prefix}_written"][at] == beat[prefix]["written"]
    assert sum(found["comm_read"]) == sum(found["comm_written"])
    # The exchange is over, and its last heartbeat is still there.
    _, failed = draw({"/shuffle": scheduler_pages.applications["/shuffle"]}, s, {})
    assert not failed


@two_workers
async def test_every_page_is_drawn_during_a_shuffle(c, s, a, b):
    await check_exchange(c, s, (a, b), shuffled)


@only_if_all
@two_workers
async def test_every_page_is_drawn_during_a_rechunk(c, s, a, b):
    await check_exchange(c, s, (a, b), rechunked)


@only_if_all
@gen_cluster(
    client=True,
    nthreads=[("", 1)] * 2,
    timeout=120,
    config=MANAGED_ALONE,
    scheduler_kwargs=WITH_DASHBOARD,
    worker_kwargs={**WITH_DASHBOARD, "memory_limit": 32 * MIB},
)
async def test_every_page_is_drawn_when_values_are_spilled(c, s, a, b):
    failures = []
    for is_on in (False, True):
        if is_on:
            await dask_gpurt.enable(c)
        values = c.compute([block(n) for n in range(24)])
        await wait(values)
        # More is stored than the workers may have in memory, so the rest is on disk.
        await async_poll_for(lambda: on_disk(s) >= 24 * 4 * MIB - 2 * 32 * MIB, timeout=60)
        pages, failed = everything(s, (a, b))
        failures.append(failed)
        found = drawn(pages["/individual-workers-memory"], "spilled")
        shown = dict(zip(found["worker"], found["spilled"], strict=True))
        assert shown == {ws.address: ws.memory.spilled for ws in s.workers.values()}
        del values
        await async_poll_for(lambda: not s.tasks, timeout=60)
    assert failures[0] == failures[1]
    assert failures[1].keys() <= FAIL_ON_STOCK


def on_disk(s):
    return sum(ws.memory.spilled for ws in s.workers.values())
