"""Files of traces: the records of a `Trace` as JSON, compressed."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import asdict

from dask_gpurt.tracing.events import (
    Instant,
    LaneWork,
    LinkFacts,
    Sample,
    TaskTimes,
    Trace,
    TraceProcess,
)

_ROWS = {
    "work": LaneWork,
    "tasks": TaskTimes,
    "instants": Instant,
    "samples": Sample,
    "links": LinkFacts,
}


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(asdict(trace), file)


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a file. Raises `OSError` for a damaged one."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        found["processes"] = [TraceProcess(**one) for one in found["processes"]]
        for name, row in _ROWS.items():
            found[name] = [row(*one) for one in found[name]]
        found["tasks"] = [one._replace(needs=tuple(one.needs)) for one in found["tasks"]]
        return Trace(**found)
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise OSError(f"{os.fspath(path)} is not a trace: {error}") from error
