"""A dashboard with a key answers nothing without it, and everything with it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from urllib.parse import urlsplit

import dask
import pytest
from distributed.http.routing import RoutingApplication
from distributed.http.utils import get_handlers
from distributed.utils_test import gen_cluster
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

import dask_gpurt
from dask_gpurt.plugins.patches.shown import keyed_dashboard
from dask_gpurt.plugins.patches.shown.keyed_dashboard import KeyedDashboard

pytest.importorskip("bokeh", reason="stock has no dashboard without it")

#: As `dask_gpurt.local_cluster` starts schedulers.
WITHOUT_PAGES = {
    "config": {"distributed.scheduler.http.routes": []},
    "scheduler_kwargs": {"dashboard": False},
}
ROUTES = (
    "/",
    "/status",
    "/gpurt",
    "/gpurt.json",
    "/info/main/workers.html",
    "/json/counts.json",
    "/metrics",
    "/statics/css/base.css",
    "/no/such/page",
)


async def get(dashboard, path, cookie=None):
    """Return the code of an answer, and the answer."""
    base = urlsplit(dashboard.address)
    request = HTTPRequest(
        f"{base.scheme}://{base.netloc}{path}",
        follow_redirects=False,
        headers={"Cookie": f"{dashboard.cookie}={cookie}"} if cookie is not None else {},
    )
    answer = await AsyncHTTPClient().fetch(request, raise_error=False)
    return answer.code, answer


def key_of(dashboard):
    return urlsplit(dashboard.address).query.removeprefix("key=")


async def refusals(dashboard, cookie=None):
    codes = {path: (await get(dashboard, path, cookie))[0] for path in ROUTES}
    codes["sitemap"], _ = await get(dashboard, "/sitemap.json", cookie)
    codes["wrong key"], _ = await get(dashboard, "/status?key=wrong", cookie)
    try:
        url = dashboard.address.replace("http://", "ws://").partition("/status")[0]
        (await websocket_connect(f"{url}/status/ws")).close()
        codes["websocket"] = 101
    except HTTPClientError as error:
        codes["websocket"] = error.code
    return {path: code for path, code in codes.items() if code != 403}


@gen_cluster(client=True, nthreads=[("", 1)], **WITHOUT_PAGES)
async def test_nothing_is_answered_without_the_key(c, s, a):
    dashboard = KeyedDashboard(s)
    await dask_gpurt.enable(c)
    assert await refusals(dashboard) == {}
    assert await refusals(dashboard, "wrong") == {}
    await dashboard.open()
    assert await refusals(dashboard) == {}
    assert await refusals(dashboard, "wrong") == {}
    assert await refusals(dashboard, "é") == {}


#: The pages that a scheduler has by default.
STOCK = dask.config.merge(*dask.config.defaults)["distributed"]["scheduler"]["http"]["routes"]


@gen_cluster(client=True, nthreads=[("", 1)], **WITHOUT_PAGES)
async def test_the_key_opens_all_pages(c, s, a):
    dashboard = KeyedDashboard(s)
    await dask_gpurt.enable(c)
    with dask.config.set({"distributed.scheduler.http.routes": STOCK}):
        path = dashboard.address.partition(urlsplit(dashboard.address).netloc)[2]
        code, answer = await get(dashboard, path)
    # The browser goes on without the key in its address.
    assert (code, answer.headers["Location"]) == (302, "/status")
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"{dashboard.cookie}={key_of(dashboard)};")
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    codes = {path: (await get(dashboard, path, key_of(dashboard)))[0] for path in ROUTES}
    assert codes == {**dict.fromkeys(ROUTES, 200), "/": 301, "/no/such/page": 404}
    code, answer = await get(dashboard, "/status", key_of(dashboard))
    assert b'href="gpurt"' in answer.body
    applications = list(s.http_application.applications)
    await get(dashboard, path)
    assert s.http_application.applications == applications
    assert await refusals(dashboard) == {}


@gen_cluster(client=True, nthreads=[], **WITHOUT_PAGES)
async def test_without_bokeh_the_answer_says_so(c, s):
    dashboard = KeyedDashboard(s)
    path = dashboard.address.partition(urlsplit(dashboard.address).netloc)[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "distributed.dashboard.scheduler", None)
        code, answer = await get(dashboard, path)
        assert code == 501
        assert b"There is no dashboard" in answer.body
    # It is tried again: it may have been installed meanwhile.
    assert (await get(dashboard, path))[0] == 302


def test_nothing_of_bokeh_is_imported_before_the_key_is_shown():
    program = """
import sys
from dask_gpurt import local_cluster
if __name__ == "__main__":
    with local_cluster.start(1, 1) as cluster:
        address = local_cluster.offer_dashboard(cluster)
        assert address.startswith("http://127.0.0.1:")
        print([name for name in sys.modules if name.split(".")[0] == "bokeh"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stderr


def test_no_address_is_offered_without_bokeh(monkeypatch):
    assert keyed_dashboard.has_bokeh()
    monkeypatch.setattr(keyed_dashboard.importlib.util, "find_spec", lambda name: None)
    assert not keyed_dashboard.has_bokeh()


def test_private_names_are_as_expected():
    from distributed.dashboard.scheduler import connect

    assert list(inspect.signature(connect).parameters) == [
        "application",
        "http_server",
        "scheduler",
        "prefix",
    ]
    assert list(inspect.signature(get_handlers).parameters) == ["server", "modules", "prefix"]
    assert list(inspect.signature(RoutingApplication.find_handler).parameters) == [
        "self",
        "request",
        "kwargs",
    ]
