"""The dashboard's page in Bokeh. `overview` shapes what is drawn here, `tables` has its texts.

Imported only by a scheduler with a dashboard, which has Bokeh.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from dask.utils import format_bytes

from dask_gpurt.plugins.dashboard import tables
from dask_gpurt.plugins.dashboard.gathering import Gatherer
from dask_gpurt.plugins.dashboard.overview import PATHS, TIERS, matrix
from dask_gpurt.plugins.patches.shown.dashboard_pages import dress

#: How often an open page is drawn again.
INTERVAL_MS = 1_000
#: Most workers with a bar of memory: those with the most bytes.
MAX_BARS = 32
#: Most workers for which cells of the matrix have texts.
MAX_WITH_TEXT = 8
#: Opacity of the smallest transfer, and width of a cell.
_FAINTEST = 0.2
_WIDTH = 0.94

_TIER_FIELDS = ("worker", "left", "right", "colour", "tier", "size")
_PHASE_FIELDS = ("shuffle", "left", "right", "colour", "phase", "seconds")


def draw(gatherer: Gatherer, variables: dict[str, Any], document: Any) -> None:
    """Fill a new document, and keep it up to date while a browser shows it."""
    dress(document, variables, "Dask: Data Movement")
    page = DataMovement(gatherer)
    page.update()
    document.add_root(page.root)
    # The document keeps the page, and the callback only refers to it: no cycle stays behind.
    document.components = {page}
    reference = weakref.ref(page)

    def update() -> None:
        if (found := reference()) is not None:
            found.update()
            if gatherer.is_closed:
                document.remove_periodic_callback(again)

    again = document.add_periodic_callback(update, INTERVAL_MS)


class DataMovement:
    """All figures and tables of one open page."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self.headline = Div(text=tables.quiet("Asking the workers …"), name="headline")
        self.shuffles = Div(name="shuffles", sizing_mode="stretch_width")
        self.placement = Div(name="placement", sizing_mode="stretch_width")
        self.codecs = Div(name="codecs", sizing_mode="stretch_width")
        self.tiers_legend = Div(name="tiers_legend")
        self.links = _LinksFigure()
        self.memory = _MemoryFigure()
        self.phases = _PhasesFigure()
        phases = tables.legend(
            (tables.PHASE_COLOURS[phase], name) for phase, name in tables.PHASE_NAMES.items()
        )
        self.root = column(
            self.headline,
            row(
                self.links.figure,
                column(self.memory.figure, self.tiers_legend, sizing_mode="stretch_width"),
                sizing_mode="stretch_width",
            ),
            row(
                column(self.phases.figure, Div(text=phases)),
                self.shuffles,
                sizing_mode="stretch_width",
            ),
            self.placement,
            self.codecs,
            sizing_mode="stretch_width",
            spacing=8,
            margin=(4, 16, 4, 16),
        )

    @without_property_validation
    def update(self) -> None:
        """Draw the latest data, and have them renewed."""
        seen = self._gatherer.look()
        if self._gatherer.is_closed:
            self.headline.text = tables.titled("dask_gpurt was switched off", "")
            return
        if seen is None:
            return
        self.headline.text = tables.headline(seen)
        self.tiers_legend.text = tables.tiers_legend(seen)
        self.shuffles.text = tables.titled("Shuffles", tables.shuffles(seen))
        self.placement.text = tables.titled("Placement", tables.placement(seen))
        self.codecs.text = tables.titled("Compression", tables.codecs(seen))
        self.links.update(seen)
        self.memory.update(seen)
        self.phases.update(seen)


class _LinksFigure:
    """The matrix of workers: who sent how much to whom lately, and by which paths."""

    def __init__(self) -> None:
        #: One rectangle for each pair of workers and path, and one text for each pair.
        self.source = ColumnDataSource(_columns(_LINK_FIELDS), name="links")
        self.texts = ColumnDataSource(_columns(("from", "to", "text")), name="link_texts")
        self._columns, self._rows = FactorRange(), FactorRange()
        self.figure = figure(
            title="Bytes from (row) to (column)",
            x_range=self._columns,
            y_range=self._rows,
            x_axis_location="above",
            width=560,
            height=370,
            tools="",
            toolbar_location=None,
        )
        self.figure.rect(
            source=self.source,
            x="x",
            y="from",
            width="width",
            height=0.94,
            color="colour",
            alpha="alpha",
        )
        self.figure.text(
            source=self.texts,
            x="to",
            y="from",
            text="text",
            text_align="center",
            text_baseline="middle",
            text_font_size="11px",
        )
        self.figure.add_tools(
            HoverTool(
                tooltips=[
                    ("from", "@from"),
                    ("to", "@to"),
                    ("by", "@path"),
                    ("bytes", "@size"),
                ]
            )
        )
        self.figure.grid.visible = False
        self.figure.axis.axis_line_color = None
        self.figure.axis.major_tick_line_color = None

    def update(self, seen: Mapping[str, Any]) -> None:
        names, cells = matrix(seen)
        if list(self._columns.factors) != names:
            self._columns.factors = names
            self._rows.factors = names[::-1]
            longest = max(map(len, names), default=0)
            self.figure.xaxis.major_label_orientation = 0.6 if longest > 4 else "horizontal"
        most = max((cell["nbytes"] for cell in cells), default=1) or 1
        rectangles = [one for cell in cells for one in _rectangles(cell, most)]
        self.source.data = _columns(_LINK_FIELDS, rectangles)
        with_text = cells if len(names) <= MAX_WITH_TEXT else []
        texts = [(cell["from"], cell["to"], format_bytes(cell["nbytes"])) for cell in with_text]
        self.texts.data = _columns(("from", "to", "text"), texts)


_LINK_FIELDS = ("from", "to", "path", "nbytes", "size", "x", "width", "colour", "alpha")


def _rectangles(cell: Mapping[str, Any], most: int) -> Iterator[tuple[Any, ...]]:
    """Yield the parts of a cell: one for each path, as wide as its share of the bytes."""
    # By the root: small transfers beside a large one stay visible.
    alpha = _FAINTEST + (1 - _FAINTEST) * (cell["nbytes"] / most) ** 0.5
    left = -_WIDTH / 2
    for path, nbytes in cell["paths"].items():
        width = _WIDTH * nbytes / max(cell["nbytes"], 1)
        colour = tables.COLOURS.get(path, "#666666")
        middle = (cell["to"], left + width / 2)
        name, size = PATHS.get(path, path), format_bytes(nbytes)
        yield cell["from"], cell["to"], name, nbytes, size, middle, width, colour, alpha
        left += width


def _columns(fields: Sequence[str], rows: Sequence[tuple[Any, ...]] = ()) -> dict[str, list[Any]]:
    """Return rows as the columns of a Bokeh source."""
    return {name: [one[number] for one in rows] for number, name in enumerate(fields)}


class _MemoryFigure:
    """A bar for each worker: its tiers from left to right, and its memory limit."""

    def __init__(self) -> None:
        self.source = ColumnDataSource(_columns(_TIER_FIELDS), name="tiers")
        self.limits = ColumnDataSource({"worker": [], "limit": [], "size": []}, name="limits")
        self._rows, self._extent = FactorRange(), Range1d(start=0, end=1)
        self.figure = figure(
            title="Memory and disk of each worker",
            y_range=self._rows,
            x_range=self._extent,
            height=335,
            sizing_mode="stretch_width",
            tools="",
            toolbar_location=None,
        )
        bars = self.figure.hbar(
            source=self.source, y="worker", left="left", right="right", height=0.7, color="colour"
        )
        marks = self.figure.rect(
            source=self.limits, x="limit", y="worker", width=2, width_units="screen", height=0.9,
            color="black",
        )  # fmt: skip
        self.figure.add_tools(
            HoverTool(
                renderers=[bars],
                tooltips=[("worker", "@worker"), ("@tier", "@size")],
            ),
            HoverTool(
                renderers=[marks], tooltips=[("worker", "@worker"), ("memory limit", "@size")]
            ),
        )
        self.figure.xaxis.formatter = NumeralTickFormatter(format="0.[0] b")
        self.figure.xaxis.ticker = AdaptiveTicker(
            base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        )
        self.figure.ygrid.visible = False

    def update(self, seen: Mapping[str, Any]) -> None:
        workers = seen["workers"]
        if len(workers) > MAX_BARS:
            largest = sorted(workers, key=lambda one: -sum(one["tiers"].values()))
            workers = largest[:MAX_BARS]
        names = [one["name"] for one in workers][::-1]
        if list(self._rows.factors) != names:
            self._rows.factors = names
        bars: list[tuple[Any, ...]] = []
        for one in workers:
            left = 0
            for tier, text in TIERS.items():
                if nbytes := one["tiers"][tier]:
                    right = left + nbytes
                    bars.append(
                        (one["name"], left, right, tables.COLOURS[tier], text, format_bytes(nbytes))
                    )
                    left = right
        self.source.data = _columns(_TIER_FIELDS, bars)
        limited = [one for one in workers if one["limit_nbytes"]]
        self.limits.data = {
            "worker": [one["name"] for one in limited],
            "limit": [one["limit_nbytes"] for one in limited],
            "size": [format_bytes(one["limit_nbytes"]) for one in limited],
        }
        ends = [*self.source.data["right"], *self.limits.data["limit"], 1]
        self._extent.end = 1.05 * max(ends)


class _PhasesFigure:
    """A bar for each of the last shuffles: seconds by phase, summed over workers."""

    def __init__(self) -> None:
        self.source = ColumnDataSource(_columns(_PHASE_FIELDS), name="phases")
        self._rows, self._extent = FactorRange(), Range1d(start=0, end=1)
        self.figure = figure(
            title="Seconds of shuffles by phase, over all workers",
            y_range=self._rows,
            x_range=self._extent,
            width=460,
            height=220,
            tools="",
            toolbar_location=None,
        )
        self.figure.hbar(
            source=self.source, y="shuffle", left="left", right="right", height=0.7, color="colour"
        )
        self.figure.add_tools(
            HoverTool(
                tooltips=[
                    ("shuffle", "@shuffle"),
                    ("phase", "@phase"),
                    ("seconds", "@seconds{0.000}"),
                ]
            )
        )
        self.figure.ygrid.visible = False

    def update(self, seen: Mapping[str, Any]) -> None:
        names, bars = [], []
        for one in seen["shuffles"]:
            name = one["label"]
            names.append(name)
            left = 0.0
            for phase, text in tables.PHASE_NAMES.items():
                seconds = one["seconds"][phase]
                colour = tables.PHASE_COLOURS[phase]
                bars.append((name, left, left + seconds, colour, text, seconds))
                left += seconds
        if list(self._rows.factors) != names:
            self._rows.factors = names
        self.source.data = _columns(_PHASE_FIELDS, bars)
        self._extent.end = 1.05 * max([*self.source.data["right"], 0.01])
