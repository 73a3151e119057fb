"""Checks that a shuffle leaves nothing behind on any worker, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from typing import Any

from distributed import Status

import dask_gpurt
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.failure.gates import DEADLINE_S

_PACKAGE = os.path.dirname(dask_gpurt.__file__) + os.sep


async def left_on(dask_worker: Any) -> list[str]:
    """Describe leftovers on a worker of this process. Runs on the worker's loop."""
    found = files_in(dask_worker.local_directory)
    runs = dask_worker.plugins.get("shuffle")
    if runs is not None:
        found += [f"open run {run}" for run in runs.shuffle_runs._runs]
    found += _memory_of(dask_worker)
    found += _ucx_of(dask_worker)
    pools = [dask_worker.rpc, runtime_of(dask_worker).links.connections._pool]
    found += [
        f"endpoint to {peer} in use"
        for pool in pools
        if pool is not None
        for peer, used in pool.occupied.items()
        if used
    ]
    found += [f"task {task}" for task in asyncio.all_tasks() if _is_ours(task)]
    found += [f"thread with {key}" for key in dask_worker.active_threads.values()]
    return found


def files_in(directory: str) -> list[str]:
    """List spill directories in a worker's own one, and open files that were in one."""
    found = []
    if os.path.isdir(directory):
        found = [f"directory {name}" for name in os.listdir(directory) if name.startswith("gpurt-")]
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(os.path.join(directory, "gpurt-")):
                found.append(f"open file {path}")
    return found


def _memory_of(worker: Any) -> list[str]:
    runtime = runtime_of(worker)
    if runtime.pool.used_nbytes or runtime.links.outgoing.used_nbytes:
        gc.collect()  # results in the traceback of an exception, for instance
    is_closed = worker.status == Status.closed
    amounts = {
        "bytes of the pool": runtime.pool.used_nbytes,
        "bytes on their way out": runtime.links.outgoing.used_nbytes,
        "bytes to send": runtime.outgoing_budget.used_nbytes,
        "bytes that runs wanted to send": sum(runtime.outgoing_budget._wanted.values()),
        "bytes of the budget": runtime._budget.used_nbytes if runtime._budget is not None else 0,
        # A closed worker does not learn that its last task has ended, but it keeps nothing.
        "partitions to let go of": 0 if is_closed else len(runtime._to_release),
        "runs that have not ended": len(runtime._runs),
    }
    return [f"{amount} {what}" for what, amount in amounts.items() if amount]


def _ucx_of(worker: Any) -> list[str]:
    report = ucx_report(worker)
    if report is None:
        return []
    amounts = {**report["under_way"], "held_nbytes": report["held_nbytes"]}
    return [f"{amount} {what} of UCX" for what, amount in amounts.items() if amount]


def ucx_report(dask_worker: Any) -> dict[str, Any] | None:
    """Return the report of the worker's UCX engine, if it has one."""
    engine = runtime_of(dask_worker).links.ucx.started
    return None if engine is None else engine.report()


def links_to_nobody(client: Any) -> dict[str, list[str]]:
    """Return UCX links to engines that no worker has any more, by worker."""
    reports = {address: found for address, found in client.run(ucx_report).items() if found}
    there = {report["token"] for report in reports.values()}
    gone = {address: sorted({*report["peers"]} - there) for address, report in reports.items()}
    return {
        address: [f"UCX link to {token}, which is gone" for token in tokens]
        for address, tokens in gone.items()
        if tokens
    }


def _is_ours(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(_PACKAGE)


def forget_logged_errors() -> None:
    """Drop the errors in pytest's log records, because their frames keep messages alive.

    pytest has already formatted their text.
    """
    for handler in logging.getLogger().handlers:
        for record in getattr(handler, "records", ()):
            record.exc_info = None


def assert_nothing_left(client: Any, *closed: Any) -> None:
    """Return once nothing is left on any worker, nor on closed workers of this process.

    Workers close runs some time after the last output, so this asks repeatedly.
    """
    give_up = time.monotonic() + DEADLINE_S
    while True:
        forget_logged_errors()
        left = {address: found for address, found in client.run(left_on).items() if found}
        for worker in closed:
            if found := client.sync(left_on, worker):
                left[f"{worker.address}, which was closed"] = found
        for address, found in links_to_nobody(client).items():
            left.setdefault(address, []).extend(found)
        if not left:
            return
        assert time.monotonic() < give_up, f"left behind: {left}"
