"""``dask gpurt demo``: stock Dask against Dask with this runtime, on real data.

This module creates the data and starts the two clusters. :mod:`dask_gpurt.demo.runner` runs the
queries, and :mod:`dask_gpurt.demo.report` writes the results. The command line is parsed elsewhere.
Packages that only the demo needs are imported inside functions. So importing this module is cheap,
and a missing package is reported in one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dask_gpurt import local_cluster
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpurt.demo.runner import DemoWorkload

#: Time limit of the default demo: five minutes, including the close of the clusters.
_BUDGET_S = 280.0

#: Time limit of the queries with `--quick`: one minute, minus some seconds before and after.
_QUICK_S = 48.0

_MAX_WORKERS = 4

#: Exit status that a shell reports for a program ended by Ctrl-C.
_INTERRUPTED = 130
#: Exit status of all commands that cannot do their work.
_CANNOT_RUN = 2


class DemoError(RuntimeError):
    """The demo cannot run. The message says why in one line."""


def main(
    scale: float = 1.0,
    quick: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    out_dir: str | os.PathLike[str] = ".",
    json_output: bool = False,
    queries: Sequence[str] | None = None,
) -> int:
    """Run the demo.

    Parameters
    ----------
    scale
        TPC-H scale factor; 1 is about a gigabyte of text.
    quick
        Use scale 0.1 and time each query once, as far as one minute allows.
    cache_dir
        Directory of all data sets; None means the user's cache directory.
    out_dir
        Directory for ``report.json`` and ``report.html``.
    json_output
        Print the report as JSON on standard output, and the table on standard error.
    queries
        Names of queries such as "q3" or "weather", or of a group, "tpch" or "flights". None means
        all.

    Returns
    -------
    int
        0 if all answers agree, 1 if not, 2 if the demo could not run, 130 after Ctrl-C.
    """
    try:
        return _run(
            scale=0.1 if quick else scale,
            quick=quick,
            cache_dir=cache_dir,
            out_dir=Path(out_dir),
            json_output=json_output,
            queries=queries,
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (DemoError, GpurtError) as error:
        print(f"dask gpurt demo: {error}", file=sys.stderr)
        return _CANNOT_RUN


def _run(
    scale: float,
    quick: bool,
    cache_dir: str | os.PathLike[str] | None,
    out_dir: Path,
    json_output: bool,
    queries: Sequence[str] | None,
) -> int:
    """Run the demo like :func:`main`. Raise :class:`DemoError` if the demo cannot run."""
    start_s = time.perf_counter()
    # Check now, minutes before there is something to write.
    _check_writable(out_dir)
    with _demo_packages():
        from rich.console import Console

        from dask_gpurt.demo.report import write_html, write_json
        from dask_gpurt.demo.runner import print_table, run_demo
    notes = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        with notes.status("starting") as status:
            # A status line is overwritten, and so invisible in a file or pipe.
            say = status.update if notes.is_terminal else notes.print
            # The address stays on one line, so that a terminal finds the link.
            show = partial(notes.print, markup=False, highlight=False, soft_wrap=True)
            workloads = _workloads(scale, cache_dir, queries, say, stack)
            if quick:
                # Flights first: if time runs out, only TPC-H queries are left out.
                workloads.sort(key=lambda workload: workload.group != "flights")
            with _children_ignore_ctrl_c():
                say("starting the cluster without the runtime")
                stock, n_workers = _start_cluster(False, show, stack)
                say("starting the cluster with the runtime")
                enabled, _ = _start_cluster(True, show, stack)
        stack.push(_quiet_if_interrupted)
        read_totals = _check_active(enabled)
        elapsed_s = time.perf_counter() - start_s
        report = run_demo(
            stock,
            enabled,
            workloads,
            repeats=1 if quick else 3,
            console=notes,
            read_totals=read_totals,
            deadline_s=max(0.0, _BUDGET_S * max(1.0, scale) - elapsed_s),
            # After three queries, all workers have imported their modules and shuffled. DuckDB
            # has read the files into memory. More warm-ups would cost timed runs.
            n_warm_up=3,
            stop_s=_QUICK_S if quick else None,
            settings={
                "clusters": f"{n_workers} workers each, one process and one thread per worker",
                "connections": "encrypted on both sides; the runtime's shuffles go by memory",
                "TPC-H scale": f"{scale:g}",
                "flights": "all departures from New York in 2013, 336,776 rows",
            },
        )
    write_json(report, out_dir / "report.json")
    write_html(report, out_dir / "report.html")
    if json_output:
        print((out_dir / "report.json").read_text(encoding="utf-8"), end="")
    print_table(report, notes if json_output else Console())
    notes.print(f"wrote {out_dir / 'report.json'} and {out_dir / 'report.html'}", markup=False)
    return 0 if report.agrees else 1


def _check_writable(directory: Path) -> None:
    """Create a directory if needed. Raise :class:`DemoError` if no file can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise DemoError(f"cannot write to {directory}: {error.strerror}") from error


@contextlib.contextmanager
def _demo_packages() -> Iterator[None]:
    """Turn a failed import of a package that only the demo needs into a one-line error."""
    try:
        yield
    except ImportError as error:
        hint = "pip install 'dask-gpurt[demo]'"
        raise DemoError(f"needs {error.name or error}, which is not installed: {hint}") from error


def _workloads(
    scale: float,
    cache_dir: str | os.PathLike[str] | None,
    queries: Sequence[str] | None,
    progress: Callable[[str], None],
    stack: contextlib.ExitStack,
) -> list[DemoWorkload]:
    """Create the data of the chosen queries, and return them as workloads."""
    with _demo_packages():
        from dask_gpurt.demo.material import MissingDemoPackage
        from dask_gpurt.demo.workloads import choose, flights_workloads, tpch_workloads
    try:
        names = choose(queries)
        found: list[DemoWorkload] = []
        if names["tpch"]:
            found += tpch_workloads(scale, names["tpch"], cache_dir, progress, stack)
        if names["flights"]:
            found += flights_workloads(names["flights"], cache_dir, progress, stack)
    except (MissingDemoPackage, ValueError, RuntimeError, OSError) as error:
        raise DemoError(str(error)) from error
    return found


def _start_cluster(
    is_enabled: bool, show: Callable[[str], None], stack: contextlib.ExitStack
) -> tuple[Client, int]:
    """Start a cluster of processes that closes with ``stack``. Return its client and size."""
    import dask
    from dask.system import CPU_COUNT
    from distributed import Client

    n_workers = min(CPU_COUNT, _MAX_WORKERS)
    # The setting covers both: workers inherit settings from the process that starts them, and the
    # runtime is switched on when a client connects.
    with dask.config.set({"gpurt.enabled": is_enabled}):
        # Both clusters have encrypted connections, so that other users of this machine cannot use
        # them.
        cluster = stack.enter_context(local_cluster.start(n_workers, threads_per_worker=1))
        if (dashboard := local_cluster.offer_dashboard(cluster)) is not None:
            show(f"dashboard: {dashboard}")
        # Neither client becomes the default one: the runner sets the current client.
        client = stack.enter_context(
            Client(cluster, set_as_default=False)  # type: ignore[no-untyped-call]
        )
    return client, n_workers


@contextlib.contextmanager
def _children_ignore_ctrl_c() -> Iterator[None]:
    """Make processes started in the `with` block ignore Ctrl-C, which a terminal sends to all.

    The cluster ends its workers. A worker killed by its own signal would look crashed. The closing
    cluster would restart it, and never end.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set signal handlers. In another thread, Ctrl-C is not ours to
        # handle.
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _quiet_if_interrupted(kind: type[BaseException] | None, *_rest: object) -> None:
    """Keep asyncio from logging every task that Ctrl-C abandoned when the clusters close."""
    if kind is KeyboardInterrupt:
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _check_active(enabled: Client) -> Callable[[Client], Mapping[str, int]]:
    """Raise unless the runtime is active on its cluster. Return a function that reads counters."""
    from dask_gpurt import status

    found = status(enabled)
    if not found.get("active"):
        reason = found.get("reason")
        detail = f": {reason}" if reason else ""
        raise DemoError(f"the runtime is not active on the cluster made for it{detail}")

    def read_totals(client: Client) -> Mapping[str, int]:
        # The stock cluster has no counters to read.
        totals: Mapping[str, int] = status(client)["totals"] if client is enabled else {}
        return totals

    return read_totals
