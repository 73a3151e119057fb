"""Private names of distributed with which a page is added to a scheduler's running dashboard.

| what | why | taken back by |
|---|---|---|
| `Scheduler.http_application.applications` | the applications that the server asks for a page, in
this order; ours is one more | `AddedPage.uninstall` |
| `distributed.dashboard.core.BokehApplication`, `.DaskBokehTornado` | makes an application with the
settings of the dashboard's own; tells whether there is a dashboard | |
| `distributed.dashboard.scheduler.template_variables` | its lists are in the menu of all pages |
`AddedPage.uninstall` |
| `distributed.dashboard.components.scheduler.env`, `.BOKEH_THEME` | the template and the look of
the other pages | |

Nothing of Bokeh is imported unless the scheduler has a dashboard, which has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tornado.ioloop import IOLoop

if TYPE_CHECKING:
    from distributed import Scheduler

_PAGES = "distributed.dashboard.scheduler"


def dashboard_of(scheduler: Scheduler) -> Any:
    """Return the Bokeh application of a scheduler's dashboard; None if it has none."""
    if _PAGES not in sys.modules:
        return None
    from distributed.dashboard.core import DaskBokehTornado

    server: Any = getattr(scheduler, "http_application", None)
    found = (one for one in getattr(server, "applications", ()) if type(one) is DaskBokehTornado)
    return next(found, None)


class AddedPage:
    """A page under *More* on a scheduler's dashboard, until `uninstall`.

    Parameters
    ----------
    scheduler
        A live scheduler with a dashboard.
    route
        Path of the page, such as `/gpurt`.
    title
        Name of the page in the menu.
    draw
        Fills a new Bokeh document, given the variables of the page's template.
    handlers
        Further paths of the server, with their Tornado handlers and the handlers' arguments.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        route: str,
        title: str,
        draw: Callable[[dict[str, Any], Any], None],
        handlers: dict[str, tuple[type[Any], dict[str, Any]]],
    ) -> None:
        from distributed.dashboard.core import BokehApplication
        from distributed.dashboard.scheduler import template_variables

        dashboard = dashboard_of(scheduler)
        variables = template_variables(scheduler)
        prefix = dashboard.prefix
        self._server: Any = scheduler.http_application
        self._application = BokehApplication(
            {route: lambda server, extra, document: draw(extra, document)},
            scheduler,
            prefix=prefix,
            template_variables=variables,
        )
        self._application.add_handlers(
            r".*", [(prefix + path, *handler) for path, handler in handlers.items()]
        )
        self._application.initialize(IOLoop.current())
        self._application.start()
        self._server.add_application(self._application)
        #: The list itself: every page refers to it.
        self._menu: list[dict[str, str]] = variables["plots"]
        self._entry = {"url": route.lstrip("/"), "name": title}
        self._menu.append(self._entry)
        self._menu.sort(key=lambda entry: entry["name"])

    def uninstall(self) -> None:
        """Remove the page and its entry. A browser that shows it receives nothing more."""
        if self._application in self._server.applications:
            self._server.applications.remove(self._application)
            self._menu.remove(self._entry)
            # Bokeh 3.10 refuses to wait on the event loop.
            self._application.stop(wait=False)


def dress(document: Any, variables: dict[str, Any], title: str) -> None:
    """Give a document the template and the look of the dashboard's own pages."""
    from distributed.dashboard.components.scheduler import BOKEH_THEME, env

    document.title = title
    document.template = env.get_template("simple.html")
    document.template_variables.update(variables)
    document.theme = BOKEH_THEME
