"""A progress line on stderr.

A separate thread draws it from snapshots while tasks wait or run, and wipes it afterwards. The
script's own output is neither redirected nor wrapped. `dask gpurt run` uses it, and
`dask_gpurt.progress` outside of notebooks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from dask.utils import format_bytes, format_time

from dask_gpurt.command.layout import columns_of
from dask_gpurt.command.observe import CounterSnapshot

INTERVAL_S = 0.5

#: Clears the line of a terminal.
WIPE = "\r\x1b[2K"
_BAR_WIDTH = 24


class Progress:
    """A progress line.

    Parameters
    ----------
    snapshot
        Called whenever the line is drawn.
    stream
        Output stream; by default the current standard error.
    """

    def __init__(
        self, snapshot: Callable[[], CounterSnapshot], stream: TextIO | None = None
    ) -> None:
        self._snapshot = snapshot
        self._stream = stream or sys.stderr
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = time.monotonic()
        self._is_drawn = False

    def start(self) -> None:
        """Start to draw."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="gpurt-progress", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Wipe the line and stop."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        try:
            while not self._stopped.is_set():
                self._draw()
                self._stopped.wait(INTERVAL_S)
            self._wipe()
        except (OSError, ValueError):
            # The terminal is gone, or the script closed stderr.
            return

    def _draw(self) -> None:
        now = self._snapshot()
        if now.tasks_done >= now.tasks_total:
            # Idle: the script may be asking a question on this line.
            self._wipe()
            return
        width = columns_of(self._stream) - 1
        self._stream.write(WIPE + _line(now, time.monotonic() - self._start_s, width) + "\r")
        self._stream.flush()
        self._is_drawn = True

    def _wipe(self) -> None:
        if self._is_drawn:
            self._stream.write(WIPE)
            self._stream.flush()
            self._is_drawn = False


def _line(now: CounterSnapshot, elapsed_s: float, width: int) -> str:
    text = progress_text(now, elapsed_s)
    if len(text) + _BAR_WIDTH + 1 > width:
        return text[:width]
    return f"{_bar(now.tasks_done, now.tasks_total)} {text}"


def progress_text(now: CounterSnapshot, elapsed_s: float) -> str:
    """Return the line without its bar."""
    parts = [
        f"{now.tasks_done}/{now.tasks_total} tasks",
        f"{format_bytes(now.totals['sent_nbytes'])} moved",
    ]
    if spilled_nbytes := int(now.spent.get("written_nbytes", 0)):
        parts.append(f"{format_bytes(spilled_nbytes)} spilled")
    parts.append(format_time(elapsed_s))
    return ", ".join(parts)


def _bar(done: int, total: int) -> str:
    try:
        from rich.console import Console
        from rich.progress_bar import ProgressBar
    except ImportError:
        filled = _BAR_WIDTH * done // total
        return "#" * filled + "-" * (_BAR_WIDTH - filled)
    # Only called for a terminal, or if the caller demands progress.
    console = Console(width=_BAR_WIDTH, force_terminal=True)
    with console.capture() as captured:
        console.print(ProgressBar(total=total, completed=done, width=_BAR_WIDTH), end="")
    return captured.get().rstrip("\n")
