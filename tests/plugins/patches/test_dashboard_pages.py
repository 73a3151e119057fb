"""A page is added to a running dashboard, and removed from it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from distributed.utils_test import captured_logger, gen_cluster
from tornado.httpclient import AsyncHTTPClient

import dask_gpurt

pytest.importorskip("bokeh", reason="stock has no dashboard without it")

from bokeh.server.tornado import BokehTornado
from distributed.dashboard import scheduler as scheduler_pages
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication, DaskBokehTornado
from distributed.http.routing import RoutingApplication

WITH_DASHBOARD = {"dashboard": True, "dashboard_address": ":0"}


async def get(s, route):
    """Return the status of a page and its text."""
    url = f"http://127.0.0.1:{s.http_server.port}{route}"
    answer = await AsyncHTTPClient().fetch(url, raise_error=False)
    return answer.code, answer.body.decode()


def entries(s):
    return [entry["name"] for entry in scheduler_pages.template_variables(s)["plots"]]


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs=WITH_DASHBOARD)
async def test_the_page_is_there_while_the_runtime_is_on(c, s, a):
    stock, applications = entries(s), list(s.http_application.applications)
    assert (await get(s, "/gpurt"))[0] == 404
    await dask_gpurt.enable(c)
    for route in ("/gpurt", "/gpurt.json", "/status"):
        code, text = await get(s, route)
        assert code == 200, route
        assert route == "/gpurt.json" or '<a href="gpurt">Data Movement</a>' in text
    assert entries(s) == sorted([*stock, "Data Movement"])
    await dask_gpurt.disable(c)
    for route in ("/gpurt", "/gpurt.json"):
        assert (await get(s, route))[0] == 404
    code, text = await get(s, "/status")
    assert code == 200
    assert "gpurt" not in text
    assert entries(s) == stock
    assert s.http_application.applications == applications
    await dask_gpurt.enable(c)
    assert (await get(s, "/gpurt"))[0] == 200
    assert entries(s).count("Data Movement") == 1


@gen_cluster(client=True, nthreads=[("", 1)], scheduler_kwargs=WITH_DASHBOARD)
async def test_an_error_of_bokeh_does_not_stop_disable(c, s, a):
    await dask_gpurt.enable(c)
    with pytest.MonkeyPatch.context() as patched, captured_logger("dask_gpurt") as log:

        def stop(self, wait=True):
            raise RuntimeError("cannot wait on a running event loop")

        patched.setattr(BokehTornado, "stop", stop)
        await dask_gpurt.disable(c)
    assert "cannot wait on a running event loop" in log.getvalue()
    assert not (await dask_gpurt.status(c))["active"]
    assert "gpurt_glance" not in a.handlers
    assert (await get(s, "/gpurt"))[0] == 404


@gen_cluster(client=True, nthreads=[], scheduler_kwargs={**WITH_DASHBOARD, "http_prefix": "/a/b"})
async def test_the_page_is_under_the_dashboards_prefix(c, s):
    await dask_gpurt.enable(c)
    for route in ("/gpurt", "/gpurt.json"):
        assert (await get(s, f"/a/b{route}"))[0] == 200
        assert (await get(s, route))[0] == 404


@gen_cluster(client=True, nthreads=[], scheduler_kwargs={"dashboard": False})
async def test_a_scheduler_without_dashboard_has_no_page(c, s):
    await dask_gpurt.enable(c)
    assert (await dask_gpurt.status(c))["active"]
    assert (await get(s, "/gpurt.json"))[0] == 404


def test_bokeh_is_not_imported_without_a_dashboard():
    program = """
import asyncio, sys
from distributed import Client, Scheduler
import dask_gpurt
async def main():
    async with Scheduler(port=0, dashboard=False, dashboard_address=":0") as s:
        async with Client(s.address, asynchronous=True) as c:
            await dask_gpurt.enable(c)
            assert (await dask_gpurt.status(c))["active"]
    print([name for name in sys.modules if name.split(".")[0] == "bokeh"])
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


@gen_cluster(client=True, nthreads=[], scheduler_kwargs=WITH_DASHBOARD)
async def test_private_names_are_as_expected(c, s):
    assert isinstance(s.http_application, RoutingApplication)
    (dashboard,) = s.http_application.applications
    assert type(dashboard) is DaskBokehTornado
    assert isinstance(dashboard, BokehTornado)
    assert dashboard.prefix == ""
    made = BokehApplication({"/x": lambda *args: None}, s, prefix="/a", template_variables={})
    assert (type(made), made.prefix) == (DaskBokehTornado, "/a")
    variables = scheduler_pages.template_variables(s)
    assert variables is scheduler_pages.template_variables(s)
    assert {"url": "shuffle", "name": "Shuffle"} in variables["plots"]
    assert "plot_div" in env.loader.get_source(env, "simple.html")[0]
    assert BOKEH_THEME is not None
