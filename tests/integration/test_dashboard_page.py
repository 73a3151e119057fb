"""The runtime's page shows a shuffle, a rechunk and a spill while they happen, as does its JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math

import pandas as pd
import pytest
from distributed import Worker, wait
from distributed.utils_test import async_poll_for, captured_logger, gen_cluster
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from dask_gpurt.errors import ProtocolError
from dask_gpurt.plugins.dashboard import gathering
from tests.integration.held_exchanges import all_moved, held, rechunked, shuffled, update
from tests.integration.memory_cluster import MANAGED_ALONE, MIB, block

pytest.importorskip("bokeh", reason="stock has no dashboard without it")

#: Its module has another name in pandas 2.
FRAMES = f"{pd.DataFrame.__module__}.DataFrame"
WITH_DASHBOARD = {"dashboard": True, "dashboard_address": ":0"}


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch):
    """Have workers asked for each answer: data that is a second old may miss what just happened."""
    monkeypatch.setattr(gathering, "INTERVAL_S", 0)
    monkeypatch.setattr(gathering, "WORKERS_PER_S", math.inf)


async def read_json(s):
    url = f"http://127.0.0.1:{s.http_server.port}/gpurt.json"
    answer = await AsyncHTTPClient().fetch(url)
    assert answer.headers["Content-Type"].startswith("application/json")
    return json.loads(answer.body)


def open_page(s):
    """Return the document of our page, made as for a browser."""
    (context,) = [
        contexts["/gpurt"]
        for contexts in (one.applications for one in s.http_application.applications)
        if "/gpurt" in contexts
    ]
    return context.application.create_document()


async def drawn(s):
    """Return the page's sources by name, and its texts by name, once they are up to date."""
    with captured_logger(logging.getLogger(), level=logging.ERROR) as errors:
        page = open_page(s)
        await read_json(s)  # it waits for the data that the page asked for
        update(page)
    assert errors.getvalue() == ""
    sources = {name: page.get_model_by_name(name).data for name in ("links", "tiers", "phases")}
    texts = ("headline", "shuffles", "placement", "codecs")
    return sources, {name: page.get_model_by_name(name).text for name in texts}


@gen_cluster(
    client=True,
    nthreads=[("", 2)] * 2,
    timeout=120,
    config={"gpurt.shuffle.memory": "16 KiB", "gpurt.shuffle.transport": "comm"},
    scheduler_kwargs=WITH_DASHBOARD,
)
async def test_a_shuffle_and_a_rechunk_are_shown(c, s, a, b):
    await dask_gpurt.enable(c)
    ends = {a.address, b.address}
    for outputs, kind in ((shuffled, FRAMES), (rechunked, "array")):
        async with held(c, s, outputs(4), all_moved):
            counted = (await dask_gpurt.status(c))["shuffles"][-1]
            seen = await read_json(s)
            sources, texts = await drawn(s)
        (shuffle,) = [one for one in seen["shuffles"] if one["id"] == counted["id"]]
        assert shuffle["kind"] == kind
        # The first exchange stays open until Dask forgets its barrier.
        assert shuffle["is_open"]
        assert shuffle["sent_nbytes"] == counted["sent_nbytes"] > 0
        assert shuffle["seconds"]["send"] > 0
        # Each worker sends to the other one, and both figures are of the same messages.
        sent = {(one["from"], one["to"]) for one in seen["links"] if one["path"] == "comm"}
        assert sent <= {(x, y) for x in ends for y in ends - {x}}
        assert seen["paths"]["comm"] >= shuffle["sent_nbytes"]
        assert seen["paths"]["shared"] == 0
        for one in seen["workers"]:
            assert one["has_answered"]
            assert one["tiers"]["shards_on_disk"] > 0
        drawn_nbytes = zip(sources["links"]["path"], sources["links"]["nbytes"], strict=True)
        by_comm = [nbytes for path, nbytes in drawn_nbytes if path == "Dask's connections"]
        assert sum(by_comm) == seen["paths"]["comm"]
        assert {"shards on disk"} < {*sources["tiers"]["tier"]}
        assert shuffle["label"] in sources["phases"]["shuffle"]
        assert "running" in texts["shuffles"]
    seen = await read_json(s)
    assert [one["kind"] for one in seen["shuffles"]] == [FRAMES, "array"]
    await until_json(s, lambda seen: not any(one["is_open"] for one in seen["shuffles"]))
    await until_json(s, lambda seen: not any(one["tiers"]["shards"] for one in seen["workers"]))


async def until_json(s, is_so):
    """Return the JSON as soon as it is so. Each answer is the result of asking all workers."""
    async with asyncio.timeout(30):
        while not is_so(seen := await read_json(s)):
            pass
    return seen


@gen_cluster(
    client=True,
    nthreads=[("", 1)] * 2,
    timeout=120,
    # The memory manager would drop the second copies, maybe all that a worker has.
    config={**MANAGED_ALONE, "distributed.scheduler.active-memory-manager.start": False},
    scheduler_kwargs=WITH_DASHBOARD,
    worker_kwargs={"memory_limit": 32 * MIB},
)
async def test_spilled_values_and_fetched_inputs_are_shown(c, s, a, b):
    await dask_gpurt.enable(c)
    values = c.compute([block(n) for n in range(24)])
    await wait(values)
    await until_json(s, lambda seen: all(one["tiers"]["disk"] for one in seen["workers"]))
    # Both workers have some of the values, so this task has to fetch some.
    assert await c.submit(len, values, workers=[a.address], pure=False) == 24
    sources, texts = await drawn(s)
    seen = await read_json(s)
    assert seen["paths"]["inputs"] > 0
    assert {(one["from"], one["to"]) for one in seen["links"]} == {(b.address, a.address)}
    assert "values on disk" in sources["tiers"]["tier"]
    assert sum(sources["links"]["nbytes"]) == seen["paths"]["inputs"]
    assert "No shuffle has run" in texts["shuffles"]
    for one in seen["workers"]:
        ws = s.workers[one["address"]]
        assert one["limit_nbytes"] == ws.memory_limit
        assert one["tiers"]["memory"] <= 32 * MIB
        # The fetched inputs may have displaced all values of the worker that fetched them.
        assert one["tiers"]["memory"] + one["tiers"]["disk"] > 0


@gen_cluster(
    client=True,
    nthreads=[("", 1)] * 2,
    timeout=120,
    config={"gpurt.placement.policy": "data-aware"},
    scheduler_kwargs=WITH_DASHBOARD,
)
async def test_placement_is_shown_as_its_log_has_it(c, s, a, b):
    await dask_gpurt.enable(c)
    sizes = {a.address: 4 * MIB, b.address: MIB}
    inputs = [c.submit(bytes, nbytes, workers=[one]) for one, nbytes in sizes.items()]
    await wait(inputs)
    assert await c.submit(len, inputs) == 2
    seen = await read_json(s)
    log = s.plugins["gpurt"].placement.summary()
    assert seen["placement"]["saved_s"] == log["saved_s"]
    assert sum(seen["placement"]["decisions"].values()) > 0
    _, texts = await drawn(s)
    assert f"of {sum(log['decisions'].values())} tasks went to another worker" in texts["placement"]


@gen_cluster(client=True, nthreads=[("", 1)] * 2, scheduler_kwargs=WITH_DASHBOARD)
async def test_workers_are_asked_only_while_someone_looks(c, s, a, b):
    await dask_gpurt.enable(c)
    asked = []

    def counting(worker):
        ask = worker.handlers["gpurt_glance"]

        async def gpurt_glance(most_links):
            asked.append(worker.address)
            return await ask(most_links)

        worker.handlers["gpurt_glance"] = gpurt_glance

    for worker in (a, b):
        counting(worker)
    assert await c.submit(sum, [1, 2]) == 3
    for worker in (a, b):
        await worker.heartbeat()
    assert asked == []
    await read_json(s)
    assert sorted(asked) == sorted([a.address, b.address])
    plugin = s.plugins["gpurt"]
    gatherer = gathering.Gatherer(s, plugin.status, plugin.readiness.ready, plugin.tally)
    first, second = await asyncio.gather(gatherer.fresh(), gatherer.fresh())
    # Several who look at once are answered with the same data.
    assert first is second
    assert len(asked) == 4
    # A page asks when a browser has it updated, and never by itself.
    page = open_page(s)
    await until_asked(asked, 6)
    for worker in (a, b):
        await worker.heartbeat()
    assert len(asked) == 6
    update(page)
    await until_asked(asked, 8)


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs=WITH_DASHBOARD)
async def test_a_page_may_be_filled_in_a_thread(c, s, a):
    """Bokeh 3.10 does so."""
    await dask_gpurt.enable(c)
    page = await asyncio.to_thread(open_page, s)
    await read_json(s)
    update(page)
    assert "moved in the last" in page.get_model_by_name("headline").text


async def until_asked(asked, n):
    await async_poll_for(lambda: len(asked) == n, timeout=60)


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs=WITH_DASHBOARD)
async def test_an_open_page_says_that_the_runtime_is_off(c, s, a):
    await dask_gpurt.enable(c)
    page = open_page(s)
    await read_json(s)
    update(page)
    assert "moved in the last" in page.get_model_by_name("headline").text
    await dask_gpurt.disable(c)
    assert "gpurt_glance" not in a.handlers
    update(page)
    assert page.get_model_by_name("headline").text.count("switched off") == 1
    assert page.session_callbacks == []


@gen_cluster(client=True, nthreads=[("", 1)] * 2, scheduler_kwargs=WITH_DASHBOARD)
async def test_a_worker_that_fails_to_answer_is_named(c, s, a, b):
    await dask_gpurt.enable(c)

    async def gpurt_glance(most_links):
        raise ValueError("broken")

    b.handlers["gpurt_glance"] = gpurt_glance
    with captured_logger("distributed.core"):
        seen = await read_json(s)
    answered = {one["address"]: one["has_answered"] for one in seen["workers"]}
    assert answered == {a.address: True, b.address: False}


@gen_cluster(client=True, nthreads=[], scheduler_kwargs=WITH_DASHBOARD)
async def test_workers_have_different_names_on_the_page(c, s):
    """Dask takes 1 and "1" for two names. The page has a row for workers that left."""
    await dask_gpurt.enable(c)
    async with contextlib.AsyncExitStack() as stack:
        for name in (1, "1", "gone", "a"):
            await stack.enter_async_context(Worker(s.address, name=name))
        names = [one["name"] for one in (await read_json(s))["workers"]]
    assert len(set(names)) == 4 and "a" in names and "gone" not in names


@gen_cluster(client=True, nthreads=[("", 1)] * 2, scheduler_kwargs=WITH_DASHBOARD)
async def test_a_worker_that_just_left_is_no_error(c, s, a, b):
    await dask_gpurt.enable(c)

    async def gpurt_glance(comm, most_links):
        comm.abort()

    b.handlers["gpurt_glance"] = gpurt_glance
    with captured_logger("distributed.scheduler", level=logging.ERROR) as errors:
        seen = await read_json(s)
    assert [one["address"] for one in seen["workers"] if one["has_answered"]] == [a.address]
    assert errors.getvalue() == ""


@gen_cluster(client=True, nthreads=[("", 1)] * 3, scheduler_kwargs=WITH_DASHBOARD)
async def test_links_that_a_worker_does_not_list_are_summed(c, s, a, b, d):
    await dask_gpurt.enable(c)
    parts = [c.submit(bytes, 1_000, workers=[one.address], pure=False) for one in (b, d, d)]
    assert await c.submit(len, parts, workers=[a.address]) == 3
    ask = a.handlers["gpurt_glance"]
    everything = (await ask(9))["links"]
    assert [(one[0], one[1]) for one in everything] == [
        (d.address, a.address),
        (b.address, a.address),
    ]
    assert (await ask(9))["links"] == everything
    busiest, others = (await ask(1))["links"]
    assert busiest == everything[0]
    assert others == ("", a.address, *everything[1][2:])
    with pytest.raises(ProtocolError):
        await ask(-1)
