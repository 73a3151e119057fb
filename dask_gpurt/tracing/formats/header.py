"""The part of a trace that is not drawn: processes, links, versions, and how many events follow.

Both formats hold it as one JSON object, before the events. A reader recognises our files by it, and
refuses others. With the numbers of events it notices when some are missing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import LinkFacts, Trace, TraceProcess
from dask_gpurt.tracing.formats.picture import drawn_samples, earliest_ns

#: The version of how our files hold a trace. A change that old readers misread raises it.
FORMAT = 1


@dataclass(frozen=True)
class Header:
    """A trace without its events.

    Attributes
    ----------
    trace
        Has processes, links and versions, but no events yet.
    zero_ns
        Time 0 of the trace in the times of the file, which are never negative.
    counts
        How many events of each kind follow.
    """

    trace: Trace
    zero_ns: int
    counts: dict[str, int]

    def check(self) -> None:
        """Check that all events were added to the trace."""
        if (found := _counts(self.trace)) != self.counts:
            raise TraceFileError(f"it should have {self.counts} events, and has {found}")


def encode(trace: Trace) -> tuple[str, int]:
    """Return the header of a trace as JSON, and the time 0 of the trace in the file."""
    # Whole microseconds: times that are coarser than nanoseconds must stay so.
    zero_ns = max(0, -(earliest_ns(trace) // 1000) * 1000)
    header = {
        "format": FORMAT,
        "zero_ns": zero_ns,
        "counts": _counts(trace),
        "began_utc_s": trace.began_utc_s,
        "wall_s": trace.wall_s,
        "processes": [asdict(process) for process in trace.processes],
        "links": trace.links,
        "about": trace.about,
    }
    return json.dumps(header, default=str), zero_ns


def decode(header: Any) -> Header:
    """Return the header that a JSON object holds.

    Raises
    ------
    TraceFileError
        It is not ours, or has another version.
    """
    if not isinstance(header, dict) or "format" not in header:
        raise TraceFileError("dask_gpurt did not write it")
    if header["format"] != FORMAT:
        raise TraceFileError(
            f"it has format {header['format']!r}, and this version of dask_gpurt reads format"
            f" {FORMAT}; read it with the version of dask_gpurt that wrote it"
        )
    # A version with more fields may have written the file.
    known = {one.name for one in fields(TraceProcess)}
    trace = Trace(
        processes=[
            TraceProcess(**{name: value for name, value in process.items() if name in known})
            for process in header["processes"]
        ],
        links=[LinkFacts(*link) for link in header["links"]],
        began_utc_s=header["began_utc_s"],
        wall_s=header["wall_s"],
        about=header["about"],
    )
    return Header(trace, header["zero_ns"], header["counts"])


def _counts(trace: Trace) -> dict[str, int]:
    return {
        "work": len(trace.work),
        "tasks": len(trace.tasks),
        "instants": len(trace.instants),
        "samples": sum(1 for _ in drawn_samples(trace.samples)),
    }
