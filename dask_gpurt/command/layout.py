"""Text layout for terminals of any width, without breaking words.

Without a width, for a file or a pipe, lines are never broken, because programs read them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. A daemon has None for its streams."""
    return stream is not None and stream.isatty()


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal on a stream, or None if it is not a terminal.

    Parameters
    ----------
    stream
        By default, standard output.
    """
    stream = stream or sys.stdout
    return columns_of(stream) if is_terminal(stream) else None


def columns_of(stream: TextIO) -> int:
    """Return the columns of a stream's terminal: `COLUMNS` if it is set; 80 if nobody knows."""
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]):
        return int(os.environ["COLUMNS"])
    # `shutil.get_terminal_size` asks standard output, which may be a file when this is not.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return 80


def wrapped(
    text: str, width: int | None, indent: str = "", hanging: str | None = None
) -> list[str]:
    """Return the lines of a paragraph: the first with `indent`, the others with `hanging`."""
    if width is None or len(indent) + len(text) <= width:
        return [indent + text]
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [indent]


def aligned(
    rows: Sequence[tuple[str, str]], indent: str = "", width: int | None = None
) -> list[str]:
    """Return two columns. If the second does not fit beside the first, it starts a new line."""
    left_width = max((len(left) for left, _ in rows), default=0)
    lines = []
    for left, right in rows:
        if width is not None and len(indent) + left_width + 2 > width // 2:
            lines.append(indent + left)
            lines += wrapped(right, width, indent + "  ")
        else:
            first = f"{indent}{left:<{left_width}}  "
            lines += wrapped(right, width, first, " " * len(first))
    return lines


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """Return columns under headings. If they do not fit, each row becomes a list of its cells."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if width is not None and sum(widths) + 2 * len(widths) > width:
        lines = []
        for first, *rest in rows:
            lines.append(f"  {first}")
            lines += aligned(list(zip(head[1:], rest, strict=True)), "    ", width)
        return lines
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
