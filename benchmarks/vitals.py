"""Measures of the workers during a run: peak memory, disk traffic, and pauses of event loops.

`begin` and `vitals` run functions on the workers. The peak is the kernel's own (`VmHWM`), so no
short peak is missed. Spilled bytes are the store's own count, which stock Dask's store has as well.
No store counts the files of shuffles, so the process's reads and writes by system calls are
measured too. They do not include sockets. Shards read from a peer's memory look like file reads, so
they are subtracted.
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Client, Worker

from benchmarks.memory import peak, reset_peak

_STAMP_S = 0.01


class Gap(NamedTuple):
    """A time in which an event loop ran none of its callbacks.

    Attributes
    ----------
    ran_s, no_core_s
        Seconds in which its thread ran, and in which it waited for a core. In the rest it waited
        for a lock, usually the interpreter's.
    """

    seconds: float = 0.0
    ran_s: float = 0.0
    no_core_s: float = 0.0


@dataclass(frozen=True)
class Vitals:
    """Measures of one worker process since `begin`, or since its start."""

    peak_nbytes: int
    spill_read_nbytes: int
    spill_written_nbytes: int
    file_read_nbytes: int
    file_written_nbytes: int
    shard_read_nbytes: int
    shard_written_nbytes: int
    longest_gap: Gap


class _LoopWatch:
    """A task that finds the longest gap of its event loop.

    It sleeps for a short time again and again. A gap is the time by which it wakes too late.
    """

    def __init__(self) -> None:
        self.longest = Gap()
        self.task = asyncio.create_task(self._stamp())

    async def _stamp(self) -> None:
        loop = asyncio.get_running_loop()
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb") as file:
            before_s, before = loop.time(), _scheduled(file.fileno())
            while True:
                await asyncio.sleep(_STAMP_S)
                now_s, now = loop.time(), _scheduled(file.fileno())
                gap_s = now_s - before_s - _STAMP_S
                if gap_s > self.longest.seconds:
                    self.longest = Gap(gap_s, now[0] - before[0], now[1] - before[1])
                before_s, before = now_s, now


def _scheduled(fd: int) -> tuple[float, float]:
    """Return the seconds that a thread ran, and those that it waited for a core."""
    ran_ns, waited_ns, _ = os.pread(fd, 100, 0).split()
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9


_watch: _LoopWatch | None = None


async def _begin() -> int:
    global _watch
    reset_peak()
    if _watch is not None:
        _watch.task.cancel()
    _watch = _LoopWatch()
    return os.getpid()


async def _vitals(dask_worker: Worker) -> Vitals:
    spilled = getattr(dask_worker.data, "cumulative_metrics", {})
    runtime = dask_worker.extensions.get("gpurt")
    counts = runtime.counters.snapshot() if runtime is not None else {}
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return Vitals(
        peak(),
        int(spilled.get(("disk-read", "bytes"), 0)),
        int(spilled.get(("disk-write", "bytes"), 0)),
        int(io["rchar"]) - counts.get("received_nbytes", 0),
        int(io["wchar"]),
        counts.get("unspilled_nbytes", 0),
        counts.get("spilled_nbytes", 0),
        _watch.longest if _watch else Gap(),
    )


def begin(client: Client) -> set[int]:
    """Reset peaks and gaps on the workers, and return their process ids."""
    return set(client.run(_begin).values())


def vitals(client: Client) -> dict[str, Vitals]:
    """Return the measures of each worker that answers, by its address."""
    return client.run(_vitals, on_error="ignore")


def restarts(client: Client, pids: set[int]) -> dict[str, int]:
    """Count worker processes that have ended, and those that a nanny ended for their memory."""
    now: dict[Any, int] = client.run(os.getpid, on_error="ignore")
    return {
        "lost": len(pids - set(now.values())),
        "ended for memory": len(client.get_events("worker-restart-memory")),
    }


def total(of: dict[str, Vitals], field: str) -> int:
    return sum(getattr(one, field) for one in of.values())
