"""Puts traces of Nsight Systems onto the clock of a trace of ours, or onto one of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Trace, TraceProcess

#: The key of `Trace.about` under which a trace has the pids of its processes, by address.
PIDS = "pids"
#: The key of sums of kernels, which the report reads.
_KERNELS = "kernels"


def join(ours: Trace, theirs: Trace) -> Trace:
    """Return our trace, with the events of another one in their places.

    Work of a program that is a worker of ours becomes work of that worker. It is known by its host
    and its pid. Events before the start or after the end of our trace are left out.

    Parameters
    ----------
    ours
        Times of the result are times of this trace.
    theirs
        A trace of Nsight Systems, as `read_nsys` returns it.

    Raises
    ------
    TraceFileError
        One of them has no time of day, or both have no time in common.
    """
    later_s = _later_s(ours, theirs)
    workers = _workers_by_pid(ours)
    processes = list(ours.processes)
    places: dict[int, int] = {}

    def place(index: int) -> int:
        """Return where a process of theirs is in the result."""
        if index not in places:
            process = theirs.processes[index]
            pid = theirs.about.get(PIDS, {}).get(process.address)
            known = workers.get((_short(process.host), pid))
            places[index] = len(processes) if known is None else known
            if known is None:
                processes.append(process)
        return places[index]

    work = [
        one._replace(
            process=place(one.process),
            lane=_lane(theirs.processes[one.process], one.lane),
            start_s=one.start_s + later_s,
            end_s=one.end_s + later_s,
        )
        for one in theirs.work
        if one.start_s + later_s <= ours.wall_s and one.end_s + later_s >= 0
    ]
    instants = [
        one._replace(process=place(one.process), at_s=one.at_s + later_s)
        for one in theirs.instants
        if 0 <= one.at_s + later_s <= ours.wall_s
    ]
    joined = {name: value for name, value in theirs.about.items() if name != _KERNELS}
    about = {**ours.about, "joined": [*ours.about.get("joined", []), joined]}
    sums = [one.about.get(_KERNELS) for one in (ours, theirs)]
    if kernels := [row for some in sums if isinstance(some, list) for row in some]:
        about[_KERNELS] = kernels
    return replace(
        ours,
        processes=processes,
        work=sorted([*ours.work, *work], key=lambda one: one.start_s),
        instants=sorted([*ours.instants, *instants], key=lambda one: one.at_s),
        about=about,
    )


def _later_s(ours: Trace, theirs: Trace) -> float:
    """Return how much later time 0 of their trace is than ours."""
    if not ours.began_utc_s or not theirs.began_utc_s:
        which = "the trace of Nsight Systems" if ours.began_utc_s else "our trace"
        raise TraceFileError(f"{which} has no time of day, so the two cannot be joined")
    later_s = theirs.began_utc_s - ours.began_utc_s
    if later_s > ours.wall_s or later_s + theirs.wall_s < 0:
        raise TraceFileError(
            f"the two have no time in common: the one begins {abs(later_s):.1f} s"
            f" {'after' if later_s > 0 else 'before'} the other, which lasts"
            f" {(ours if later_s > 0 else theirs).wall_s:.1f} s"
        )
    return later_s


def union(traces: Sequence[Trace]) -> Trace:
    """Return all events of several traces of Nsight Systems. Time 0 is the earliest of theirs.

    Raises
    ------
    TraceFileError
        One of them has no time of day.
    """
    began_s = min(trace.began_utc_s for trace in traces)
    ends_s = (trace.began_utc_s - began_s + trace.wall_s for trace in traces)
    found = Trace([], began_utc_s=began_s, wall_s=max(ends_s))
    for trace in traces:
        found = join(found, trace)
    return found


def _workers_by_pid(trace: Trace) -> dict[tuple[str, int | None], int]:
    pids = trace.about.get(PIDS, {})
    return {
        (_short(process.host), pids[process.address]): index
        for index, process in enumerate(trace.processes)
        if process.address in pids
    }


def _short(host: str) -> str:
    """Return the name of a host without its domain, which not everybody knows."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]


def _lane(process: TraceProcess, lane: str) -> str:
    """Return the lane of work of a GPU, which several GPUs of one worker do not share."""
    device = process.address.rpartition("/")[2]
    is_device = lane.startswith("stream ") and process.address.count("/") > 3
    return f"GPU {device} {lane}" if is_device else lane
