"""HTML of figures in words and tables, for the dashboard's page and for notebooks. Pure.

Every text from outside is escaped: names of workers, labels of partitions, reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dask.utils import format_bytes, format_time

from dask_gpurt.plugins.dashboard.overview import PATHS, TIERS
from dask_gpurt.shuffle.figures import PHASES

#: Colours of paths and tiers, which people with any colour vision can tell apart.
COLOURS = {
    "shared": "#009E73",
    "ucx": "#0072B2",
    "comm": "#E69F00",
    "inputs": "#CC79A7",
    "memory": "#0072B2",
    "pinned": "#56B4E9",
    "compressed": "#F0E442",
    "shards": "#009E73",
    "other": "#BBBBBB",
    "disk": "#D55E00",
    "shards_on_disk": "#E69F00",
    "device": "#CC79A7",
}
#: Names and colours of the phases of a shuffle.
PHASE_COLOURS = {
    "partition": "#0072B2",
    "held_back": "#D55E00",
    "send": "#E69F00",
    "receive": "#56B4E9",
    "unpack": "#009E73",
}
PHASE_NAMES = {
    "partition": "cut",
    "held_back": "wait for slow peers",
    "send": "send",
    "receive": "receive",
    "unpack": "assemble",
}
assert PHASE_NAMES.keys() == PHASES.keys() == PHASE_COLOURS.keys()

_CELL = "padding: 2px 12px 2px 0; text-align: left; white-space: nowrap;"
_NUMBER = "padding: 2px 12px 2px 0; text-align: right; white-space: nowrap;"
_WIDE = "padding: 2px 12px 2px 0; text-align: left;"
_TITLE = "font-weight: bold; margin: 4px 0;"
_QUIET = "color: #666;"


class Number(str):
    """A cell that is aligned to the right."""


class Sentence(str):
    """A cell that may have several lines."""


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The first row decides which columns are numbers."""
    shown = [[f'<td style="{_style(cell)}">{escape(cell)}</td>' for cell in row] for row in rows]
    found = [row for row in shown if row]
    head = "".join(
        f'<th style="{_CELL}{_QUIET} font-weight: normal;">{escape(n)}</th>' for n in names
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in found)
    return (
        '<table style="border-collapse: collapse;">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _style(cell: str) -> str:
    return _NUMBER if isinstance(cell, Number) else _WIDE if isinstance(cell, Sentence) else _CELL


def titled(title: str, body: str) -> str:
    return f'<div style="{_TITLE}">{escape(title)}</div>{body}'


def quiet(text: str) -> str:
    return f'<div style="{_QUIET}">{escape(text)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return patches of colour with their names."""
    return "".join(
        '<span style="margin-right: 14px; white-space: nowrap;">'
        '<span style="display: inline-block; width: 10px; height: 10px; margin-right: 5px;'
        f' background: {colour};"></span>{escape(name)}</span>'
        for colour, name in entries
    )


def headline(seen: Mapping[str, Any]) -> str:
    """Return what moved lately, in one line for each path, and what is wrong."""
    if not seen["active"]:
        return titled("dask_gpurt is off", quiet(str(seen["reason"])))
    paths = {name: seen["paths"].get(name, 0) for name in PATHS}
    title = f"{format_bytes(sum(paths.values()))} moved in the last {seen['window_s']} s"
    parts = legend(
        (COLOURS[name], f"{PATHS[name]}: {format_bytes(nbytes)}")
        for name, nbytes in paths.items()
        if nbytes or name != "ucx"
    )
    silent = [one["name"] for one in seen["workers"] if not one["has_answered"]]
    notes = ""
    if silent:
        named = ", ".join(silent[:3]) + (" and others" if len(silent) > 3 else "")
        notes = quiet(f"No answer from {len(silent)} of {len(seen['workers'])} workers: {named}.")
    return titled(title, f"<div>{parts}</div>{notes}")


def tiers_legend(seen: Mapping[str, Any]) -> str:
    used = {name for one in seen["workers"] for name, nbytes in one["tiers"].items() if nbytes}
    return legend((COLOURS[name], text) for name, text in TIERS.items() if name in used)


def shuffles(seen: Mapping[str, Any]) -> str:
    """Return a table of the last shuffles, the newest first."""
    rows = []
    for one in reversed(seen["shuffles"]):
        wire = (
            "none"
            if not one["raw_nbytes"]
            else (f"{format_bytes(one['raw_nbytes'])} as {format_bytes(one['wire_nbytes'])}")
        )
        hot = ", ".join(f"{name} ({rows:,} rows)" for name, rows in one["hot"])
        rows.append(
            (
                one["label"],
                # Not known to a status.
                {True: "running", False: "ended", None: ""}[one.get("is_open")],
                one["kind"],
                Number(f"{one['rows']:,}"),
                Number(format_bytes(one["nbytes"])),
                Number(format_bytes(one["sent_nbytes"])),
                Number(wire),
                Number(f"{one['skew']:.2f}"),
                Sentence(hot or "none"),
            )
        )
    stock = seen["runs"]["stock"]
    notes = quiet(f"{stock} more ran on stock Dask: {_fallbacks(seen)}") if stock else ""
    if not rows:
        return quiet("No shuffle has run on dask_gpurt yet.") + notes
    names = (
        "shuffle", "", "data", "rows", "bytes", "to other workers", "over connections", "skew",
        "hot partitions",
    )  # fmt: skip
    return table(names, rows) + notes


def _fallbacks(seen: Mapping[str, Any]) -> str:
    return "; ".join(f"{one['what']}, {one['why']} ({one['count']})" for one in seen["fallbacks"])


def placement(seen: Mapping[str, Any]) -> str:
    """Return how often placement differs from stock Dask, what that saved, and the last cases."""
    placed = seen["placement"]
    if placed is None:
        return quiet("Placement is off: gpurt.placement.enabled is false.")
    n_placed = sum(placed["decisions"].values())
    if placed["policy"] == "stock":
        return quiet(f"Stock Dask placed all {n_placed:,} tasks.")
    summary = (
        f"{placed['differ_from_stock']:,} of {n_placed:,} tasks went to another worker than stock "
        "Dask's choice. Where costs were compared, this saves "
        f"{placed['saved_s']:.1f} s by estimate."
    )
    name_of = {one["address"]: one["name"] for one in seen["workers"]}
    rows = [
        (
            one["key"] if len(one["key"]) <= 60 else one["key"][:59] + "…",
            name_of.get(one["worker"], one["worker"]),
            name_of.get(one["stock_worker"], str(one["stock_worker"])),
            Number(_saved(one["saved_s"])),
            Sentence(one["reason"]),
        )
        for one in placed["last_differing"]
    ]
    names = ("task", "worker", "stock Dask's", "time saved", "why")
    return f"<div>{escape(summary)}</div>" + (table(names, rows) if rows else "")


def _saved(seconds: float | None) -> str:
    """Say what a choice saves. A rule that needs no costs makes no estimate."""
    if seconds is None:
        return "not estimated"
    return format_time(seconds) if seconds > 0 else "0 s"


def codecs(seen: Mapping[str, Any]) -> str:
    """Return which codecs were chosen, what they saved, and the largest sections."""
    found = seen["codecs"]
    if not found["raw_nbytes"]:
        return quiet("No shuffle bytes went over connections, so there was nothing to compress.")
    summary = (
        f"{format_bytes(found['raw_nbytes'])} of shuffle data went over connections as "
        f"{format_bytes(found['wire_nbytes'])}."
    )
    if not found["choices"]:
        return f"<div>{escape(summary)}</div>" + quiet(
            "Nothing was compressed: codecs would have been slower than the links, or the links' "
            "speed is not known yet."
        )
    counted = ", ".join(f"{choice}: {n}" for choice, n in found["choices"].items())
    name_of = {one["address"]: one["name"] for one in seen["workers"]}
    rows = [
        (
            one["section"],
            f"{name_of.get(one['from'], one['from'])} to {name_of.get(one['link'], one['link'])}",
            one["choice"],
            Number(f"{one['ratio']:.1f}"),
            Number(f"{format_bytes(int(one['bandwidth']))}/s" if one["bandwidth"] else "unknown"),
            Sentence(one["reason"]),
        )
        for one in found["largest"]
    ]
    names = ("section", "link", "codec", "ratio", "link's speed", "why")
    return f"<div>{escape(f'{summary} Decisions by codec: {counted}.')}</div>" + table(names, rows)
