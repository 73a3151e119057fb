"""Each metric and label that the Grafana dashboard queries is exported by a real worker."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from distributed import wait
from distributed.utils_test import async_poll_for, gen_cluster
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt
from tests.integration.held_exchanges import all_moved, held, shuffled
from tests.integration.memory_cluster import MANAGED_ALONE, MIB, block
from tests.limits import HANG_S

parser = pytest.importorskip("prometheus_client.parser")

ROOT = pathlib.Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "data-movement.json").read_text())
#: A metric with its selectors, and `by (...)` with its labels.
METRIC = re.compile(r"(dask_\w+)(?:\{([^}]*)\})?")
SELECTOR = re.compile(r'(\w+)(=~?)"([^"]*)"')
GROUPING = re.compile(r"by \(([^)]*)\)")


SPILLED = ("memory-monitor", "disk-write", "bytes")


def queries():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


async def samples(*workers):
    """Return the labels of all samples with values above 0, by the name of the metric."""
    found = {}
    for worker in workers:
        url = f"http://127.0.0.1:{worker.http_server.port}/metrics"
        text = (await AsyncHTTPClient().fetch(url)).body.decode()
        for family in parser.text_string_to_metric_families(text):
            for one in family.samples:
                if one.value > 0:
                    found.setdefault(one.name, []).append(one.labels)
    return found


def selects(selectors, labels):
    return all(
        re.fullmatch(wanted if how == "=~" else re.escape(wanted), labels.get(name, ""))
        for name, how, wanted in selectors
    )


@gen_cluster(
    client=True,
    nthreads=[("", 1)] * 2,
    timeout=HANG_S,
    config={
        **MANAGED_ALONE,
        "gpurt.shuffle.memory": "16 KiB",
        "gpurt.shuffle.transport": "comm",
        "distributed.worker.http.routes": ["distributed.http.worker.prometheus"],
    },
    worker_kwargs={"memory_limit": 32 * MIB},
)
async def test_every_query_finds_a_metric_of_a_worker(c, s, a, b):
    await dask_gpurt.enable(c)
    async with held(c, s, shuffled(4), all_moved):
        pass
    values = c.compute([block(n) for n in range(24)])
    await wait(values)
    await async_poll_for(
        lambda: all(ws.memory.spilled for ws in s.workers.values()), timeout=HANG_S
    )
    # Reads spilled values back.
    assert await c.submit(len, values) == 24
    # The monitor of memory records what was spilled.
    for worker in (a, b):
        await async_poll_for(lambda worker=worker: SPILLED in worker.digests_total, timeout=HANG_S)
    found = await samples(a, b)
    assert len(queries()) >= 9
    for query in queries():
        grouped = [name.strip() for by in GROUPING.findall(query) for name in by.split(",")]
        metrics = METRIC.findall(query)
        assert metrics, query
        for name, within in metrics:
            matching = [
                labels
                for labels in found.get(name, ())
                if selects(SELECTOR.findall(within), labels)
            ]
            assert matching, (name, within, sorted(found))
            assert set(grouped) <= matching[0].keys(), query


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for one in places
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
