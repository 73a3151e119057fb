"""Every page of distributed's dashboard works during a shuffle."""

from __future__ import annotations

import logging
import threading

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster

import dask_gpurt

pytest.importorskip("bokeh", reason="stock has no dashboard without it")

from bokeh.document import Document
from bokeh.models import ColumnDataSource
from distributed.dashboard import scheduler as scheduler_pages
from distributed.dashboard import worker as worker_pages
from tornado.httpclient import AsyncHTTPClient

N_INPUTS = 4
#: Addresses that are not Bokeh's.
PLAIN = ("/health", "/metrics")
PLAIN_AT_SCHEDULER = ("/info/main/workers.html", "/json/counts.json")
#: A shuffle cannot end before its last input partition is there.
last_input = threading.Event()


def part(number):
    if number == N_INPUTS - 1:
        assert last_input.wait(60)
    return pd.DataFrame({"key": range(number, number + 4_000), "x": 0.5})


def shuffled(n_outputs):
    lazy = dd.from_map(part, range(N_INPUTS), meta=pd.DataFrame({"key": [0], "x": [0.5]}))
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return lazy.shuffle("key", npartitions=n_outputs).to_delayed()


def draw(applications, server, variables):
    """Open each page and update it as for a browser that shows it.

    Returns the pages, and the kinds of errors of the pages that failed.
    """
    pages, failed = {}, {}
    for route, application in applications.items():
        if route == "/hardware":
            # This page measures the machine for ten seconds, and shows no tasks or shuffles.
            continue
        pages[route] = page = Document()
        with captured_logger(logging.getLogger(), level=logging.ERROR) as errors:
            try:
                application(server, {"prefix": "", **variables}, page)
                for callback in page.session_callbacks:
                    callback.callback()
            except Exception as error:
                failed[route] = type(error).__name__
        assert route in failed or not errors.getvalue(), route
    return pages, failed


async def ask_for(server, routes):
    """Answer requests like those of a browser."""
    for route in routes:
        answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{server.http_server.port}{route}")
        assert answer.code == 200


def everything(s, workers):
    """Return the pages that fail, and the data that the page of shuffles draws."""
    pages, failed = draw(scheduler_pages.applications, s, scheduler_pages.template_variables(s))
    for worker in workers:
        failed |= draw(worker_pages.applications, worker, worker_pages.template_variables)[1]
    sources = pages["/shuffle"].select({"type": ColumnDataSource})
    (drawn,) = (one.data for one in sources if "comm_avg_size" in one.data)
    return failed, drawn


async def during_a_shuffle(c, s, workers, n_outputs, has_moved):
    """Return heartbeats and `everything` while a shuffle waits for its last input partition."""
    last_input.clear()
    outputs = c.compute(shuffled(n_outputs))
    try:
        await async_poll_for(lambda: transferred(s) == N_INPUTS - 1, timeout=30)
        await async_poll_for(lambda: has_moved(beats(s)), timeout=30)
        known = beats(s)
        during = everything(s, workers)
        assert beats(s) == known  # no heartbeat came meanwhile
        await ask_for(s, [*PLAIN, *PLAIN_AT_SCHEDULER, "/shuffle"])
        await ask_for(workers[0], [*PLAIN, "/status"])
    finally:
        last_input.set()
    assert sum(map(len, await c.gather(outputs))) == 16_000
    return known, during


def beats(s):
    """Return the heartbeat data of all workers about the newest shuffle."""
    known = [*s.extensions["shuffle"].heartbeats.values()]
    return {worker: dict(beat) for worker, beat in known[-1].items()} if known else {}


@gen_cluster(
    client=True,
    nthreads=[("", 2)] * 2,
    timeout=120,
    config={"gpurt.shuffle.memory": "16 KiB"},
    scheduler_kwargs={"dashboard": True, "dashboard_address": ":0"},
    worker_kwargs={"dashboard": True, "dashboard_address": ":0"},
)
async def test_every_dashboard_page_is_drawn(c, s, a, b):
    def all_say(known):
        return len(known) == 2

    def all_moved(known):
        moved = [beat["comm"]["written"] for beat in known.values()]
        received = [beat["comm"]["read"] for beat in known.values()]
        spilled = [beat["disk"]["written"] for beat in known.values()]
        return len(known) == 2 and 0 < sum(moved) == sum(received) and min(spilled) > 0

    _, (stock_failed, _) = await during_a_shuffle(c, s, (a, b), 5, all_say)
    await dask_gpurt.enable(c)
    known, (failed, drawn) = await during_a_shuffle(c, s, (a, b), 4, all_moved)
    assert (await dask_gpurt.status(c))["runs"] == {"gpurt": 1, "stock": 0}
    # Dask's page of task groups fails if a group is gone on which others depend.
    assert failed == stock_failed
    assert failed.keys() <= {"/groups", "/individual-groups"}
    assert sorted(drawn["worker"]) == sorted((a.address, b.address))
    for prefix in ("comm", "disk"):
        for name in ("written", "avg_size", "avg_duration", "memory_limit"):
            assert sum(drawn[f"{prefix}_{name}"]) > 0, (prefix, name)
        for worker, beat in known.items():
            at = drawn["worker"].index(worker)
            assert drawn[f"{prefix}_written"][at] == beat[prefix]["written"]
    assert sum(drawn["comm_read"]) == sum(drawn["comm_written"])
    # The shuffle is over, and its last heartbeat is still there.
    route = "/shuffle"
    _, failed = draw({route: scheduler_pages.applications[route]}, s, {})
    assert not failed


def transferred(s):
    return sum(
        task.state == "memory"
        for task in s.tasks.values()
        if task.prefix.name == "shuffle-transfer"
    )
