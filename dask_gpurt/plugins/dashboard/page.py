"""The runtime's page on a scheduler's dashboard: `/gpurt`, and `/gpurt.json` beside it.

A scheduler without a dashboard gets no page, and nothing of Bokeh is imported.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from tornado.web import RequestHandler

from dask_gpurt.plugins.dashboard.gathering import Gatherer
from dask_gpurt.plugins.patches.shown import dashboard_pages

if TYPE_CHECKING:
    from distributed import Scheduler

logger = logging.getLogger("dask_gpurt")

ROUTE = "/gpurt"
TITLE = "Data Movement"


class OverviewJson(RequestHandler):
    """Answers with the data of the page."""

    def initialize(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer

    async def get(self) -> None:
        self.write(await self._gatherer.fresh())


class DashboardPage:
    """The page on one scheduler, with the data of a gatherer, until `uninstall`."""

    def __init__(self, scheduler: Scheduler, gatherer: Gatherer) -> None:
        self._scheduler = scheduler
        self._gatherer = gatherer
        self._page: dashboard_pages.AddedPage | None = None
        self.install()

    def install(self) -> None:
        """Add the page if there is a dashboard, and no page of ours yet."""
        if self._page is not None or dashboard_pages.dashboard_of(self._scheduler) is None:
            return
        try:
            from dask_gpurt.plugins.dashboard import drawing

            self._page = dashboard_pages.AddedPage(
                self._scheduler,
                ROUTE,
                TITLE,
                partial(drawing.draw, self._gatherer),
                {f"{ROUTE}.json": (OverviewJson, {"gatherer": self._gatherer})},
            )
        except Exception:
            # A page is never worth a runtime that does not start.
            logger.warning("the dashboard has no page of dask_gpurt", exc_info=True)

    def uninstall(self) -> None:
        self._gatherer.close()
        page, self._page = self._page, None
        try:
            if page is not None:
                page.uninstall()
        except Exception:
            # Nor is it worth a runtime that does not end.
            logger.warning("the dashboard's page did not end", exc_info=True)
