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
from dataclasses import dataclass
from pathlib import Path

import dask.config

from dask_gpurt import config
from dask_gpurt.command import lazy_client, observe, run_report
from dask_gpurt.command.embedded import EmbeddedCluster
from dask_gpurt.command.progress import Progress
from dask_gpurt.command.script import (
    INTERRUPTED,
    ScriptError,
    exit_code,
    find_module,
    find_script,
)


@dataclass(frozen=True)
class Options:
    """Options on the command line before the script.

    Attributes
    ----------
    n_workers, threads_per_worker
        Size of the cluster for a script without one. None fits the machine.
    progress
        None shows progress only on a terminal.
    """

    n_workers: int | None = None
    threads_per_worker: int | None = None
    progress: bool | None = None
    report_path: Path | None = None
    strict: bool = False


def run_script(
    name: str, args: list[str], is_module: bool = False, options: Options | None = None
) -> int | str | None:
    """Run a script or a module. The process is to end afterwards: it becomes the script's.

    Returns
    -------
    int or str or None
        What the script wants the process to exit with, as `sys.exit` takes it. If threads of the
        script go on after it, clusters are closed and the report is made when they have ended.

    Raises
    ------
    ScriptError
        Nothing was run: there is no such script, or the report could not be written.
    """
    options = options or Options()
    script = (find_module if is_module else find_script)(name, args)
    if options.report_path is not None and not options.report_path.absolute().parent.is_dir():
        raise ScriptError(f"cannot write {options.report_path}: there is no such directory")
    # Not from the script's directory on: that may have been changed by the end.
    report_path = options.report_path.absolute() if options.report_path else None
    notes: list[str] = []
    _switch_on(options.strict)

    show = sys.stderr.isatty() if options.progress is None else options.progress
    recorder = observe.Recorder(lambda: progress.start() if show else None, with_tasks=show)
    progress = Progress(recorder.snapshot)
    observe.install(recorder)
    lazy = lazy_client.LazyClient(
        lambda: EmbeddedCluster(options.n_workers, options.threads_per_worker)
    )
    if configured := dask.config.get("scheduler", None):
        notes.append(f"no cluster is started: Dask is configured to use {configured!r}")
    else:
        lazy_client.install(lazy)

    pid = os.getpid()
    for one in (lazy, recorder):
        os.register_at_fork(after_in_child=one.forget)

    # The module that runs until now keeps its globals only as long as somebody holds it.
    ours = sys.modules["__main__"]
    module = script.enter()
    start_s = time.perf_counter()
    asked = script.run(module)
    del ours
    if asked == INTERRUPTED:
        # As clients close, asyncio would print a traceback for every task that was given up.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    for stream in (sys.stdout, sys.stderr):
        # What goes wrong there is said by the interpreter when it ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()

    def end() -> int | str | None:
        if os.getpid() != pid:
            # A child that the script forked: what there is to close and to report is its parent's.
            return asked
        recorder.finish()
        lazy.close(at_once=asked == INTERRUPTED)
        progress.stop()
        return _conclude(recorder, time.perf_counter() - start_s, asked, notes, report_path)

    if asked != INTERRUPTED and others_go_on():
        # They may be computing. The interpreter waits for them, and then does what was registered
        # last first: before Dask closes the script's own clients.
        atexit.register(end)
        return asked
    try:
        return end()
    except KeyboardInterrupt:
        return INTERRUPTED


def others_go_on() -> bool:
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


def _conclude(
    recorder: observe.Recorder,
    wall_s: float,
    asked: int | str | None,
    notes: list[str],
    path: Path | None,
) -> int | str | None:
    found = run_report.as_dict(recorder.snapshot(), wall_s, exit_code(asked), notes)
    if path is not None:
        try:
            run_report.write(found, path)
        except OSError as error:
            found["notes"].append(f"the report was not written: {error}")
    # The script may have closed or replaced stderr.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(run_report.as_text(found), file=sys.stderr, flush=True)
    return asked
