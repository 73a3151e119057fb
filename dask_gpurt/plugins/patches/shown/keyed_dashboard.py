"""A dashboard that needs a key, on clusters that `run` and `demo` start.

| what | why | taken back by |
|---|---|---|
| `Scheduler.http_application.find_handler` | refuses each request that has no key, whatever
its path; tornado asks it for all requests, also of websockets | the end of the cluster |
| `distributed.dashboard.scheduler.connect`, `distributed.http.utils.get_handlers` | add stock's
pages to a scheduler that was started without | the end of the cluster |

Every user of a machine can connect to its loopback, and the pages show data and logs of tasks. The
key is a part of the address that is printed. A browser that opens this address gets a cookie, and
asks for everything else with that. `docs/decisions/0021-certificates-for-embedded-clusters.md` says
why this is enough.

The scheduler has no pages at all until the key was shown once. So nothing of Bokeh is imported for
a program whose dashboard nobody opens.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import secrets
from typing import TYPE_CHECKING, Any

import dask.config
from tornado.web import RequestHandler

if TYPE_CHECKING:
    from distributed import Scheduler


def has_bokeh() -> bool:
    """Return whether Bokeh is installed, without which there is no dashboard."""
    return importlib.util.find_spec("bokeh") is not None


class KeyedDashboard:
    """The dashboard of a scheduler that was started without pages.

    Parameters
    ----------
    scheduler
        A live scheduler. Its HTTP server must have no routes yet.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._server: Any = scheduler.http_application
        self._key = secrets.token_urlsafe(16)
        self._port: int = scheduler.http_server.port  # type: ignore[attr-defined]
        # Cookies do not distinguish ports, and a user may have several such clusters.
        self.cookie = f"dask-gpurt-{self._port}"
        self._opening: asyncio.Task[None] | None = None
        self._stock_find_handler = self._server.find_handler
        self._server.find_handler = self._find_handler  # type: ignore[method-assign]

    @property
    def address(self) -> str:
        """The address of the dashboard, with its key."""
        return f"http://127.0.0.1:{self._port}/status?key={self._key}"

    def is_key(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self._key.encode())

    def _find_handler(self, request: Any, **kwargs: Any) -> Any:
        shown = request.cookies.get(self.cookie)
        if shown is not None and self.is_key(shown.value):
            return self._stock_find_handler(request, **kwargs)
        return self._server.get_handler_delegate(request, KeyCheck, {"dashboard": self})

    async def open(self) -> None:
        """Add stock's pages, and ours if the runtime is on. Does nothing the second time.

        Raises
        ------
        ImportError
            Bokeh is missing, or of a version that distributed does not support.
        """
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._open(), name="gpurt-open-dashboard")
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        # Half a second, in which the scheduler continues.
        await asyncio.to_thread(importlib.import_module, "distributed.dashboard.scheduler")
        from distributed.dashboard.scheduler import connect
        from distributed.http.utils import get_handlers

        modules = dask.config.get("distributed.scheduler.http.routes")
        self._server.add_handlers(r".*", get_handlers(self._scheduler, modules))
        connect(self._server, self._scheduler.http_server, self._scheduler)
        for plugin in self._scheduler.plugins.values():
            if (page := getattr(plugin, "gpurt_page", None)) is not None:
                page.install()


class KeyCheck(RequestHandler):
    """Answers all requests of a browser that has not shown the key before."""

    def initialize(self, dashboard: KeyedDashboard) -> None:
        self._dashboard = dashboard

    async def get(self, *args: str) -> None:
        key = self.get_query_argument("key", "")
        if not self._dashboard.is_key(key):
            self.set_status(403)
            self.finish("Open the address that dask gpurt printed: it ends with a key.\n")
            return
        try:
            await self._dashboard.open()
        except ImportError as error:
            self.set_status(501)
            self.finish(f"There is no dashboard: {error}\n")
            return
        self.set_cookie(self._dashboard.cookie, key, httponly=True, samesite="Lax")
        self.redirect(self.request.path)
