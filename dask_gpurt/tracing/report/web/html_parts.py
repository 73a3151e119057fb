"""Pieces of HTML: escaped text, tables that become lists on a narrow screen, and strips of SVG.

The SVG pictures have no text, because they stretch with the page. Their words are HTML beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple, TypeVar

from dask_gpurt.tracing.amounts import name_text, seconds_text
from dask_gpurt.tracing.report.busy_time import Column
from dask_gpurt.tracing.report.table_columns import TableColumn

Row = TypeVar("Row")

#: Rows of a table; the others are counted.
MOST_ROWS = 20
#: Widths of the coordinate systems of pictures.
_WIDTH, _HEIGHT = 1000.0, 100.0


def text_html(text: str, most: int = 300) -> str:
    """Return text from a trace, escaped."""
    return escape(name_text(text, most))


def table_html(columns: Sequence[TableColumn], rows: Sequence[Row], nothing: str) -> str:
    """Return a table. The first column names the row.

    Parameters
    ----------
    nothing
        A sentence for a table without rows.
    """
    if not rows:
        return f'<p class="faint">{escape(nothing)}</p>'
    head = "".join(
        f'<th class="{"n" if column.is_number else ""}">{escape(column.heading)}</th>'
        for column in columns
    )
    body = []
    for row in rows[:MOST_ROWS]:
        cells = [_cell(column, row, is_first=i == 0) for i, column in enumerate(columns)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    more = ""
    if len(rows) > MOST_ROWS:
        more = f'<p class="more">and {len(rows) - MOST_ROWS:,} more</p>'
    return (
        f'<div class="box"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>{more}</div>"
    )


def _cell(column: TableColumn, row: object, is_first: bool) -> str:
    kind = "name" if is_first else "n" if column.is_number else ""
    bar = ""
    if column.share is not None:
        width = 100 * min(max(column.share(row), 0.0), 1.0)
        bar = f'<span class="bar" style="width:{width:.1f}%"></span>'
    label = escape(column.heading)
    key = "" if column.colour is None else f'<i class="key {column.colour(row)}"></i>'
    said = f"<span>{key}{text_html(column.text(row))}</span>{bar}"
    return f'<td class="{kind}" data-label="{label}">{said}</td>'


class StripPart(NamedTuple):
    """A part of a strip: its place as shares of width and height, and a text for a pointer."""

    start: float
    end: float
    kind: str
    title: str = ""
    bottom: float = 0.0
    top: float = 1.0


def strip_svg(parts: Sequence[StripPart], label: str, kind: str = "strip") -> str:
    """Return a horizontal strip that is as wide as the page."""
    drawn = []
    for part in parts:
        title = f"<title>{text_html(part.title)}</title>" if part.title else ""
        drawn.append(
            f'<rect class="{part.kind}" x="{_WIDTH * part.start:.1f}" '
            f'y="{_HEIGHT * (1 - part.top):.1f}" width="{_WIDTH * (part.end - part.start):.1f}" '
            f'height="{_HEIGHT * (part.top - part.bottom):.1f}">'
            f"{title}</rect>"
        )
    return _svg(kind, label, "".join(drawn))


def area_svg(values: Column, most: float, limit: float, label: str) -> str:
    """Return an area over time, and a dashed line at a limit; 0 for none."""
    step = _WIDTH / max(len(values), 1)
    points = []
    for i, value in enumerate(values.tolist()):
        y = _HEIGHT * (1 - min(value / most, 1.0)) if most else _HEIGHT
        points.append(f"{step * i:.1f},{y:.1f} {step * (i + 1):.1f},{y:.1f}")
    line = ""
    if 0 < limit <= most:
        y = _HEIGHT * (1 - limit / most)
        line = f'<line x1="0" x2="{_WIDTH:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    path = f"M0,{_HEIGHT:.0f} L{' '.join(points)} L{_WIDTH:.0f},{_HEIGHT:.0f} Z"
    return _svg("area", label, f'<path d="{path}"/>{line}')


def _svg(kind: str, label: str, drawn: str) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" '
        f'preserveAspectRatio="none" role="img" aria-label="{text_html(label)}">{drawn}</svg>'
    )


def axis_html(wall_s: float) -> str:
    """Return the times below a picture."""
    times = (seconds_text(wall_s * i / 4) if i else "0 s" for i in range(5))
    return f'<div class="axis">{"".join(f"<span>{one}</span>" for one in times)}</div>'
