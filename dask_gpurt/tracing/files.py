"""Files of traces, as JSON of the records."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dask_gpurt.tracing.events import Trace


def write(trace: Trace, path: Path) -> None:
    """Write a trace to a file."""
    path.write_text(json.dumps(asdict(trace)))
