"""Seconds, bytes, rates and shares as text. Units of bytes are decimal, as for networks."""

from __future__ import annotations

import re

_UNITS = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


#: Characters that steer a terminal, turn the direction of text, or no file can hold.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_MOST_CHARACTERS = 80


def name_text(name: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a name from a trace as one short line without control characters."""
    name = _CONTROL.sub("\ufffd", name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def nbytes_text(nbytes: float) -> str:
    """Return an amount of bytes, such as "1.2 GB"."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def rate_text(nbytes_per_s: float) -> str:
    """Return a rate, such as "200.0 MB/s"; a dash for none."""
    return f"{nbytes_text(nbytes_per_s)}/s" if nbytes_per_s > 0 else "-"


def seconds_text(seconds: float) -> str:
    """Return a duration, such as "12.0 s" or "3.1 ms"."""
    if not seconds:
        return "0 s"
    if abs(seconds) >= 0.095:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1000:.1f} ms"


def share_text(share: float | None) -> str:
    """Return a share, such as "92 %"; a dash for none."""
    if share is None:
        return "-"
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 task" or "1,200 tasks"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
