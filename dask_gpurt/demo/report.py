"""Output of a :class:`~dask_gpurt.demo.results.DemoReport` as JSON, or as one HTML page.

The page includes its style and chart and loads nothing. It follows the reader's light or dark
setting. It is well-formed XML too, so that any tool can read it. :mod:`dask_gpurt.demo.results`
decides the content.
"""

from __future__ import annotations

import json
import math
import os
from html import escape
from pathlib import Path

from dask_gpurt.demo.results import SAME_WITHIN, TIMED_ONCE, DemoReport, Row, format_nbytes

_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d2125; --faint: #667079;
  --rule: #e1e4e6; --card: #ffffff; --faster: #0f8a6d; --slower: #c8561b; --same: #8a949c; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e8eaec;
  --faint: #98a2ab; --rule: #2c3237; --card: #1b1f23; --faster: #35b893; --slower: #ee8a4f;
  --same: #78838c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
p { margin: 0 0 .75rem; max-width: 44rem; }
.faint { color: var(--faint); }
.cards { display: grid; gap: .75rem; margin: 1.5rem 0 0;
  grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem;
  padding: .8rem 1rem; }
.card b { display: block; font-size: 1.6rem; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
.card span { color: var(--faint); font-size: .85rem; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--rule);
  border-radius: .6rem; padding: .5rem .9rem; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
svg text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .faint { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--rule); } svg .one { stroke: var(--ink); stroke-width: 1.5; }
.bar.faster { fill: var(--faster); } .bar.slower { fill: var(--slower); }
.bar.same { fill: var(--same); }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: .8rem; }
th, td { padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
tfoot td { font-weight: 600; border-bottom: 0; border-top: 2px solid var(--rule); }
td.n, th.n { text-align: right; white-space: nowrap; }
td.faster { color: var(--faster); } td.slower, td.bad { color: var(--slower); }
td.faster, td.slower { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.25rem; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
"""

#: Geometry of the chart, in the units of its own coordinate system.
_WIDTH, _LEFT, _RIGHT, _STEP, _BAR, _TOP = 860, 240, 60, 24, 15, 28


def write_json(report: DemoReport, path: str | os.PathLike[str]) -> None:
    """Write a report as JSON. A file at `path` is replaced."""
    text = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def write_html(report: DemoReport, path: str | os.PathLike[str]) -> None:
    """Write a report as one self-contained HTML page. A file at `path` is replaced."""
    Path(path).write_text(html_page(report), encoding="utf-8")


def html_page(report: DemoReport) -> str:
    """Return the page that :func:`write_html` writes."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>dask_gpurt demo</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Stock Dask against Dask with dask_gpurt</h1>
<p class="faint">{len(report.rows)} queries on this machine, {escape(report.started)}.</p>
{_cards(report)}
<h2>Speed-up per query</h2>
<p class="faint">Stock time divided by the time with dask_gpurt. Right of the line at 1.0 the
runtime was faster, left of it slower. Grey is no clear difference: within {SAME_WITHIN:.0%}, or
the median of the faster side does not beat the best run of the other.
{TIMED_ONCE if report.min_runs == 1 else ""}</p>
<div class="wide">{_chart(report.rows)}</div>
<h2>All times</h2>
<div class="wide">{_table(report)}</div>
{_differences(report.rows)}
<p>{escape(report.left_out_sentence)}</p>
<h2>How it was measured</h2>
<p>Two clusters on one machine ran the same queries in turn, and which of them went first
alternated. A time is the wall time from building the query to holding its answer in the client.
Each figure is the median of up to {report.repeats} timed run{"s" if report.repeats != 1 else ""}
({_warm_up_sentence(report.rows)}); “runs” says how many there were. Every answer was compared with
DuckDB's over the same files, and the two Dask answers with each other.</p>
{_definitions({**report.settings, "whole run": f"{report.duration_s:.0f} s"})}
<h2>Machine</h2>
{_definitions(report.machine)}
</main>
</body>
</html>
"""


def _cards(report: DemoReport) -> str:
    """Return the headline figures."""
    figures = [
        (_number(report.total_ratio, "×"), "stock time over gpurt time, all queries"),
        (_number(report.mean_ratio, "×"), "geometric mean of the ratios"),
        (
            f"{report.count('faster')} / {report.count('same')} / {report.count('slower')}",
            "queries faster / no clear difference / slower",
        ),
        (
            f"{sum(row.agrees for row in report.rows)} of {len(report.rows)}",
            "queries whose answers all agree",
        ),
    ]
    cards = (
        f'<div class="card"><b>{figure}</b><span>{text}</span></div>' for figure, text in figures
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _chart(rows: list[Row]) -> str:
    """Return the bars as SVG."""
    ratios = [row.ratio for row in rows if not math.isnan(row.ratio)]
    tick = _tick(max([1.25, *ratios]))
    # The axis ends at a tick, and never at the line of 1.0 itself.
    end = tick * math.ceil(max([1.25, *ratios]) / tick)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    bottom = _TOP + _STEP * len(rows)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {bottom + 8}" role="img" '
        'aria-label="Horizontal bars: stock time over gpurt time, per query">'
    ]
    for i in range(round(end / tick) + 1):
        x = _LEFT + i * tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="faint" x="{x:.1f}" y="{_TOP - 10}" text-anchor="middle">'
            f"{i * tick:g}×</text>"
        )
    for i, row in enumerate(rows):
        parts.append(_bar(row, _TOP + _STEP * i, scale))
    one = _LEFT + scale
    # Drawn last, to be visible across the bars.
    parts.append(f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="{_TOP}" y2="{bottom}"/>')
    return "".join([*parts, "</svg>"])


def _tick(largest: float) -> float:
    """Return the distance of four to nine grid lines: 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest))
    steps = (factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0))
    return next(step for step in steps if largest / step <= 8)


def _bar(row: Row, top: float, scale: float) -> str:
    """Return one query's label, bar and figure."""
    middle = top + _STEP / 2
    parts = [
        f"<g><title>{escape(row.name)}, {escape(row.title)}: stock {row.stock_median_s:.2f} s, "
        f"gpurt {row.enabled_median_s:.2f} s</title>",
        f'<text x="0" y="{middle + 4.5:.1f}">{escape(row.name)}</text>',
        f'<text class="faint" x="62" y="{middle + 4.5:.1f}">{escape(_cut(row.title))}</text>',
    ]
    if math.isnan(row.ratio):
        parts.append(f'<text class="faint" x="{_LEFT + 6}" y="{middle + 4.5:.1f}">no time</text>')
    else:
        width = row.ratio * scale
        parts.append(
            f'<rect class="bar {row.verdict}" x="{_LEFT}" y="{middle - _BAR / 2:.1f}" '
            f'width="{width:.1f}" height="{_BAR}" rx="2"/>'
        )
        # The line at 1.0 would strike through a figure just left of it.
        x = max(_LEFT + width, _LEFT + scale if width < scale else 0) + 7
        parts.append(f'<text x="{x:.1f}" y="{middle + 4.5:.1f}">{row.ratio:.2f}</text>')
    return "".join([*parts, "</g>"])


def _cut(text: str, limit: int = 27) -> str:
    """Return a title short enough for the space left of the bars."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _table(report: DemoReport) -> str:
    """Return the table of all times, with counters if any were read."""
    has_totals = any(row.enabled_totals for row in report.rows)
    headings = [("query", ""), ("", ""), ("rows", "n"), ("stock", "n"), ("gpurt", "n")]
    headings += [("ratio", "n"), ("runs", "n")]
    if has_totals:
        headings += [("shuffles by gpurt", "n"), ("sent", "n"), ("spilled", "n")]
    headings.append(("answers", ""))
    head = "".join(f'<th class="{kind}">{text}</th>' for text, kind in headings)
    body = []
    for row in report.rows:
        cells = [
            ("", escape(row.name)),
            ("", escape(row.title)),
            ("n", f"{row.n_rows:,}"),
            ("n", _number(row.stock_median_s, " s")),
            ("n", _number(row.enabled_median_s, " s")),
            (f"n {row.verdict}", _number(row.ratio, "×")),
            ("n", str(row.n_runs)),
        ]
        if has_totals:
            totals = row.enabled_totals
            ours, theirs = totals.get("shuffles_gpurt", 0), totals.get("shuffles_stock", 0)
            cells.append(("n", f"{ours} of {ours + theirs}"))
            for name in ("sent_nbytes", "spilled_nbytes"):
                cells.append(("n", format_nbytes(totals.get(name, 0))))
        cells.append(("", "agree") if row.agrees else ("bad", "differ"))
        body.append(
            f'<tr data-query="{escape(row.name)}">'
            + "".join(f'<td class="{kind}">{text}</td>' for kind, text in cells)
            + "</tr>"
        )
    rest = '<td colspan="5"></td>' if has_totals else ""
    foot = (
        '<td>total</td><td colspan="2">sum of the medians</td>'
        f'<td class="n">{_number(report.stock_total_s, " s")}</td>'
        f'<td class="n">{_number(report.enabled_total_s, " s")}</td>'
        f'<td class="n">{_number(report.total_ratio, "×")}</td>'
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
        f"<tfoot><tr>{foot}{rest or '<td></td><td></td>'}</tr></tfoot></table>"
    )


def _differences(rows: list[Row]) -> str:
    """Return the differences of all answers that differ."""
    items = [
        f"<li><b>{escape(row.group)} {escape(row.name)}</b>: {escape(row.difference)}</li>"
        for row in rows
        if row.difference is not None
    ]
    return f"<h2>Answers which differ</h2><ul>{''.join(items)}</ul>" if items else ""


def _warm_up_sentence(rows: list[Row]) -> str:
    """Return a sentence on the untimed warm-up runs."""
    n_warm = sum(row.warmed_up for row in rows)
    if n_warm == len(rows):
        return "after one untimed run on each cluster"
    return f"after one untimed run on each cluster for {n_warm} of the queries"


def _definitions(entries: dict[str, str]) -> str:
    """Return names and values as a definition list."""
    items = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries.items())
    return f"<dl>{''.join(items)}</dl>"


def _number(value: float, unit: str) -> str:
    """Return a figure with its unit; a dash for NaN."""
    return "–" if math.isnan(value) else f"{value:.2f}{unit}"
