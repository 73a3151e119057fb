"""``dask gpurt trace``: trace a running cluster for some seconds.

Standard error shows progress, on a terminal only. Ctrl-C ends the trace early; the file is written
all the same. `plugins.tracing` records.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from dask_gpurt.command.connect import connected, required_address
from dask_gpurt.command.layout import is_terminal
from dask_gpurt.command.progress import WIPE
from dask_gpurt.plugins.tracing.cluster_trace import ClusterTrace, Keys
from dask_gpurt.tracing import files

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.tracing.events import Trace

_INTERVAL_S = 0.5


def record(
    scheduler: str | None,
    scheduler_file: Path | None,
    seconds: float,
    path: Path,
    keys: Keys,
) -> int:
    """Trace a cluster and write the file.

    Returns
    -------
    int
        0, or 1 if events of some process are missing; standard output says which.

    Raises
    ------
    GpurtError
        There is no such scheduler, it refuses, or the file cannot be written.
    """
    address = required_address(scheduler, scheduler_file)
    files.check(path)
    with connected(address) as client:
        tracing = ClusterTrace(client, path, keys)
        with _interrupts() as interrupted:
            found: Trace = client.sync(  # type: ignore[no-untyped-call]
                _traced, client, tracing, seconds, interrupted
            )
        tracing.write(found)
    return _say(found, path)


async def _traced(
    client: Client, tracing: ClusterTrace, seconds: float, interrupted: list[bool]
) -> Trace:
    await tracing.begin()
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0 and not interrupted:
        if client.scheduler is None:
            break  # it is gone, and `collect` says so
        _draw(f"tracing {client.scheduler.address}: {left_s:.0f} s left; Ctrl-C ends it")
        await asyncio.sleep(min(_INTERVAL_S, left_s))
    try:
        return await tracing.collect(
            lambda nbytes: _draw(f"collecting events: {format_bytes(nbytes)}")
        )
    finally:
        _draw("")


def _draw(text: str) -> None:
    if is_terminal(sys.stderr):
        sys.stderr.write(WIPE + text)
        sys.stderr.flush()


@contextlib.contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Give a list that fills with the first Ctrl-C. A second one interrupts the program."""
    seen: list[bool] = []

    def note(*_: Any) -> None:
        seen.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _say(trace: Trace, path: Path) -> int:
    """Print what the file has, and what it lacks; return the exit status."""
    workers = trace.processes[1:]
    error_s = max((one.clock_error_s for one in workers), default=0.0)
    print(
        f"{path}: {trace.wall_s:.1f} s, {trace.n_events:,} events of {len(workers)} workers, clocks"
        f" within {1e3 * error_s:.2g} ms"
    )
    if (why := trace.about.get("runtime")) != "on":
        print(f"The runtime is off ({why}): there are tasks and samples, no messages and no lanes.")
    lacking = [one for one in trace.processes if one.ended or one.n_dropped]
    for one in lacking:
        said = [one.ended] * bool(one.ended)
        said += [f"{one.n_dropped:,} events were dropped"] * bool(one.n_dropped)
        print(f"{one.address}: {'; '.join(said)}")
    return 1 if lacking else 0
