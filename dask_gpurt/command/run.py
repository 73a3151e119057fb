"""``dask gpurt run``: run an unchanged script with the runtime on, and report at the end.

`script` runs the script. If the script has no cluster, `lazy_client` starts one. `observe` records
counters and `progress` shows them. All our output goes to stderr.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import dask.config

from dask_gpurt import config
from dask_gpurt.command import lazy_client, observe, run_report
from dask_gpurt.command.embedded import EmbeddedCluster
from dask_gpurt.command.layout import is_terminal, terminal_width
from dask_gpurt.command.progress import Progress
from dask_gpurt.command.script import (
    INTERRUPTED,
    ScriptError,
    exit_code,
    find_module,
    find_script,
)
from dask_gpurt.command.traces import nsys_wrapper


@dataclass(frozen=True)
class Options:
    """Options on the command line before the script.

    Attributes
    ----------
    n_workers, threads_per_worker, memory_limit_nbytes
        Size of the cluster for a script without one. None fits the machine.
    progress
        None shows progress only on a terminal.
    trace_path, trace_keys
        File for a trace of the first cluster, and whether it has whole keys of tasks. None for no
        trace.
    nsys_directory
        Folder for reports of Nsight Systems, to run workers under it.
    stock
        Leave the runtime off, whatever the settings say, and record what stock Dask does.
    """

    n_workers: int | None = None
    threads_per_worker: int | None = None
    memory_limit_nbytes: int | None = None
    progress: bool | None = None
    report_path: Path | None = None
    strict: bool = False
    trace_path: Path | None = None
    trace_keys: Literal["prefix", "full"] = "prefix"
    nsys_directory: Path | None = None
    stock: bool = False


class _Session:
    """The recorder, the progress line and the lazy client around one script.

    Parameters
    ----------
    report_path
        File for the report as JSON, if wanted.
    """

    def __init__(self, options: Options, report_path: Path | None) -> None:
        self._report_path = report_path
        self._has_nsys = options.nsys_directory is not None
        self._notes: list[str] = []
        self._pid = os.getpid()
        show = is_terminal(sys.stderr) if options.progress is None else options.progress
        self._recorder = _recorder(options, lambda: self._progress.start() if show else None, show)
        self._progress = Progress(self._recorder.snapshot)
        observe.install(self._recorder)
        self._lazy = lazy_client.LazyClient(partial(_start_cluster, options))
        if configured := dask.config.get("scheduler", None):
            self._notes.append(f"no cluster is started: Dask is configured to use {configured!r}")
        else:
            lazy_client.install(self._lazy)
        if hasattr(os, "register_at_fork"):  # Windows has no fork
            for one in (self._lazy, self._recorder):
                os.register_at_fork(after_in_child=one.forget)

    def end(self, status: int | str | None, start_s: float) -> None:
        """Close the clusters and print the report.

        Parameters
        ----------
        status
            Exit status that the script asks for.
        start_s
            Time at the start of the script.
        """
        if os.getpid() != self._pid:
            # In a child that the script forked: the parent closes and reports.
            return
        wall_s = time.perf_counter() - start_s
        self._recorder.finish()
        if self._has_nsys and self._lazy.own is None:
            self._notes.append("--nsys had no effect: no cluster was started for the script")
        self._lazy.close(at_once=status == INTERRUPTED)
        self._progress.stop()
        report = run_report.as_dict(
            self._recorder.snapshot(),
            wall_s,
            exit_code(status),
            self._notes,
            self._lazy.start_s,
        )
        if self._report_path is not None:
            try:
                run_report.write(report, self._report_path)
            except OSError as error:
                report["notes"].append(f"the report was not written: {error}")
        more = self._recorder.closing_text()
        # The script may have closed or replaced stderr.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # A trace knows more than counters, and its verdict may be another one.
            text = run_report.as_text(
                report, terminal_width(sys.stderr), with_verdict=not self._recorder.has_verdict
            )
            print(f"{text}\n\n{more}" if more else text, file=sys.stderr, flush=True)


def _recorder(options: Options, on_first: Callable[[], None], with_tasks: bool) -> observe.Recorder:
    if options.trace_path is None:
        return observe.Recorder(on_first, with_tasks, with_stock=options.stock)
    from dask_gpurt.command.traces.profile import TracingRecorder

    path = options.trace_path.absolute()  # the script may change the current directory
    return TracingRecorder(on_first, with_tasks, path, options.trace_keys)


def _start_cluster(options: Options) -> EmbeddedCluster:
    """Start the cluster for a script without one, and print the address of its dashboard."""
    nsys = None
    if (directory := options.nsys_directory) is not None:
        if found := nsys_wrapper.find():
            nsys = found, directory
            _say(f"reports of Nsight Systems will be in {directory}")
        else:
            _say("nsys is not on PATH: workers run without Nsight Systems")
    cluster = EmbeddedCluster(
        options.n_workers, options.threads_per_worker, nsys, options.memory_limit_nbytes
    )
    if cluster.dashboard is not None:
        _say(f"dashboard: {cluster.dashboard}")
    return cluster


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"dask gpurt run: {line}", file=sys.stderr, flush=True)


def run_script(
    name: str, args: list[str], is_module: bool = False, options: Options | None = None
) -> int | str | None:
    """Run a script or a module. The process must end afterwards, because it becomes the script's.

    Returns
    -------
    int or str or None
        Exit status that the script asks for, in the form that `sys.exit` accepts. If threads of
        the script continue, clusters are closed and the report is printed when they have ended.

    Raises
    ------
    ScriptError
        Nothing was run: there is no such script, or the directory of a file to write.
    """
    options = options or Options()
    script = (find_module if is_module else find_script)(name, args)
    if options.report_path is not None and not options.report_path.absolute().parent.is_dir():
        raise ScriptError(f"cannot write {options.report_path}: there is no such directory")
    if options.trace_path is not None:
        from dask_gpurt.tracing import files

        try:
            files.check(options.trace_path)
        except OSError as error:
            raise ScriptError(str(error)) from error
    # Absolute, because the script may change the current directory.
    report_path = options.report_path.absolute() if options.report_path else None
    if options.nsys_directory is not None:
        options = replace(options, nsys_directory=_made(options.nsys_directory))
    if options.stock:
        _switch_off()
    else:
        _switch_on(options.strict)
    session = _Session(options, report_path)

    # A reference, or the current main module would lose its globals when it is replaced.
    own_main = sys.modules["__main__"]
    module = script.enter()
    start_s = time.perf_counter()
    status = script.run(module)
    del own_main
    if status == INTERRUPTED:
        # As clients close, asyncio would print a traceback for every abandoned task.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for stream in (sys.stdout, sys.stderr):
        # The interpreter reports errors of these streams when it ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

    if status != INTERRUPTED and threads_still_work():
        # The threads may be computing. The interpreter waits for them, and then calls the last
        # registered function first: before Dask closes the script's own clients.
        atexit.register(session.end, status, start_s)
        return status
    try:
        session.end(status, start_s)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _made(directory: Path) -> Path:
    """Make a folder, and return its absolute path."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScriptError(f"cannot make the folder {directory}: {error.strerror}") from error
    return directory.absolute()


def threads_still_work() -> bool:
    """Return whether the interpreter will wait for other threads that still have work.

    A pool's thread that runs a function not written in Python looks idle, and counts as idle:
    Dask's pools have idle threads in every script.
    """
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon or thread.ident not in frames:
            continue
        if frames[thread.ident].f_code.co_filename != concurrent.futures.thread.__file__:
            return True
    return False


def _switch_off() -> None:
    os.environ["DASK_GPURT__ENABLED"] = "false"
    dask.config.set({"gpurt.enabled": False})


def _switch_on(is_strict: bool) -> None:
    settings = {"gpurt.enabled": True}
    os.environ["DASK_GPURT__ENABLED"] = "true"
    if is_strict:
        settings["gpurt.strict"] = True
        os.environ["DASK_GPURT__STRICT"] = "true"
    dask.config.set(settings)
    preload = "distributed.client.preload"
    if not config.preloads()["client"]:
        # A user's own list has replaced ours.
        dask.config.set({preload: [config.PRELOAD, *config.preload_list("client")]})
        argv = list(dask.config.get(f"{preload}-argv", None) or [])
        if argv and not any(isinstance(one, str) for one in argv):
            dask.config.set({f"{preload}-argv": [[], *argv]})
