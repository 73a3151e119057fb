"""``dask gpurt convert``: turn exports of Nsight Systems and traces into one file of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.files import ENDINGS, read, write
from dask_gpurt.tracing.nsight.join_traces import join, union
from dask_gpurt.tracing.nsight.nsys import read_nsys


def convert(paths: Sequence[Path], out: Path, ours: Path | None = None) -> str:
    """Read files, put their events on one clock, and write one file.

    Parameters
    ----------
    paths
        Exports of Nsight Systems; or one trace alone, to change its format.
    out
        The file to write.
    ours
        A trace of a cluster. The result has its times, and ends as it does; work of processes that
        are workers of it becomes work of these.

    Returns
    -------
    str
        What was written.

    Raises
    ------
    TraceFileError
        A file cannot be read, written or joined.
    """
    if ours is None and len(paths) == 1:
        (path,) = paths
        trace = read(path) if path.name.endswith(ENDINGS) else read_nsys(path)
    else:
        for path in paths:
            if path.name.endswith(ENDINGS):
                raise TraceFileError(
                    f"{path} is a trace of a cluster; only exports of Nsight Systems can be joined,"
                    " to the trace that --join names"
                )
        traces = [read_nsys(path) for path in paths]
        trace = union(traces) if ours is None else read(ours)
        if ours is not None:
            for other in traces:
                trace = join(trace, other)
    write(trace, out)
    return f"{out}: {_summary(trace)}"


def _summary(trace: Trace) -> str:
    n_dropped = sum(process.n_dropped for process in trace.processes)
    parts = [
        f"{len(trace.processes)} processes",
        f"{trace.n_events:,} events",
        f"{trace.wall_s:.1f} s",
    ]
    if n_dropped:
        parts.append(f"{n_dropped:,} events are only in sums")
    return ", ".join(parts)
