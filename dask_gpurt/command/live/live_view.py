"""Where `dask_gpurt.progress` shows what moves: one output of a notebook, or a line of a terminal.

`progress_html` makes the texts for notebooks, `progress` draws the line. IPython is imported in a
kernel alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dask_gpurt.command import layout, progress, run_report
from dask_gpurt.command.live import progress_html
from dask_gpurt.command.observe import CounterSnapshot


class LiveOutput:
    """What an output of a notebook shows: HTML, or text where a front end has no HTML."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


class NotebookView:
    """One output of a notebook's cell, which is replaced as things move.

    Parameters
    ----------
    snapshot
        Returns what has moved so far.
    """

    def __init__(self, snapshot: Callable[[], CounterSnapshot]) -> None:
        from IPython.display import display

        self._snapshot = snapshot
        #: The program closes the output from its thread, the event loop replaces it from another.
        self._lock = threading.Lock()
        self._is_closed = False
        self._handle: Any = display(self._now({}, 0.0), display_id=True)

    def show(self, seen: Mapping[str, Any], elapsed_s: float) -> None:
        """Show the data of the dashboard's page, unless the output is closed."""
        with self._lock:
            if not self._is_closed:
                self._handle.update(self._now(seen, elapsed_s))

    def close(self, report: dict[str, Any]) -> None:
        """Show the report, and nothing after it."""
        with self._lock:
            self._is_closed = True
            html, text = progress_html.final(report), run_report.as_text(report)
            self._handle.update(LiveOutput(html, text))

    def _now(self, seen: Mapping[str, Any], elapsed_s: float) -> LiveOutput:
        text = progress.progress_text(self._snapshot(), elapsed_s)
        return LiveOutput(progress_html.running(seen, text), text)


class TerminalView:
    """The line of `dask gpurt run` on standard error, and its report at the end.

    Parameters
    ----------
    snapshot
        Returns what has moved so far.
    """

    def __init__(self, snapshot: Callable[[], CounterSnapshot]) -> None:
        self._line = progress.Progress(snapshot)
        # A log would get each state of the line.
        if layout.is_terminal(sys.stderr):
            self._line.start()

    def show(self, seen: Mapping[str, Any], elapsed_s: float) -> None:
        """Do nothing: the line draws itself, in a thread that a stopped terminal may hold up."""

    def close(self, report: dict[str, Any]) -> None:
        """Wipe the line and print the report."""
        self._line.stop()
        if sys.stderr is None:  # a program without a console
            return
        text = run_report.as_text(report, layout.terminal_width(sys.stderr))
        print(text, file=sys.stderr, flush=True)
