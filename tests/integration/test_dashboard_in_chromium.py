"""A browser shows the page of a shuffle, keeps it up to date, and reports no error."""

from __future__ import annotations

import contextlib
import shutil

import dask
import dask.dataframe as dd
import pandas as pd
import pytest
from distributed import Client, Event, LocalCluster

import dask_gpurt
from dask_gpurt import local_cluster

pytest.importorskip("bokeh", reason="stock has no dashboard without it")
playwright = pytest.importorskip("playwright.sync_api", reason="drives the browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
]

#: It runs as root, without a network, and with little shared memory.
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
]
N_INPUTS = 4
#: The sources of a page's live documents, by name.
SOURCES = """() => Object.fromEntries(
    Bokeh.documents.flatMap(one => [...one._all_models.values()])
    .filter(model => model.type === 'ColumnDataSource' && model.name)
    .map(model => [model.name, Object.fromEntries(
        [...(model.data instanceof Map ? model.data : Object.entries(model.data))]
        .map(([field, values]) => [field, [...values]]))]))"""


def part(number):
    if number == N_INPUTS - 1:
        assert Event("last input").wait(60)
    return pd.DataFrame({"key": range(number, number + 100_000), "x": 0.5})


@contextlib.contextmanager
def browser():
    """Start Chromium; yields a function that opens a page, and the errors of all pages."""
    errors = []
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=OPTIONS)
        view = chromium.new_page(viewport={"width": 1400, "height": 900})
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.on(
            "console",
            lambda said: errors.append(said.text) if said.type == "error" else None,
        )
        yield view, errors
        chromium.close()


@pytest.fixture
def client():
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            memory_limit="1 GiB",
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        yield client


def test_a_browser_shows_a_shuffle(client, tmp_path):
    frame = dd.from_map(part, range(N_INPUTS), meta=pd.DataFrame({"key": [0], "x": [0.5]}))
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        rows = client.compute(frame.shuffle("key").map_partitions(len).sum())
    with browser() as (view, errors):
        view.goto(client.dashboard_link)
        view.get_by_text("More...").hover()
        view.get_by_role("link", name="Data Movement").click()
        # While the last input partition is missing, the page shows what the others moved.
        view.get_by_text("running", exact=True).wait_for(timeout=90_000)
        view.wait_for_function(
            f"() => ({SOURCES})().links.nbytes.reduce((x, y) => x + y, 0) > 1e6", timeout=90_000
        )
        sources = view.evaluate(SOURCES)
        # On a slow machine, workers also take partitions over from each other.
        taken_over = {"inputs of tasks, over Dask's connections"}
        assert {*sources["links"]["path"]} - taken_over == {"shared memory"}
        assert {*sources["links"]["from"]} == {*sources["links"]["to"]} == {"0", "1"}
        assert {"values", "shards of shuffles"} <= {*sources["tiers"]["tier"]}
        assert sources["phases"]["shuffle"]
        assert view.title() == "Dask: Data Movement"
        for heading in ("Shuffles", "Placement", "Compression"):
            assert view.get_by_text(heading, exact=True).is_visible()
        picture = tmp_path / "page.png"
        view.screenshot(path=picture, full_page=True)
        assert picture.stat().st_size > 20_000  # an empty page has about 10 kB
        Event("last input", client=client).set()
        assert rows.result(timeout=60) == N_INPUTS * 100_000
        view.get_by_text("ended", exact=True).wait_for(timeout=90_000)
        dask_gpurt.disable(client)
        view.get_by_text("dask_gpurt was switched off").wait_for(timeout=90_000)
    assert errors == []


def test_a_browser_opens_a_dashboard_with_a_key():
    with local_cluster.start(1, 1) as cluster, Client(cluster) as client:
        dask_gpurt.enable(client)
        address = local_cluster.offer_dashboard(cluster)
        with browser() as (view, errors):
            view.goto(address)
            assert "key" not in view.url
            view.get_by_text("More...").hover()
            view.get_by_role("link", name="Data Movement").click()
            # This comes through the websocket, which has no key but the cookie.
            view.get_by_text("moved in the last").wait_for(timeout=90_000)
        assert errors == []
        with browser() as (view, _):
            assert view.goto(address.partition("?")[0]).status == 403
