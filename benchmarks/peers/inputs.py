"""Parquet files that all engines read, and the right answers, from NumPy alone."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.answers import of_aggregation, of_shuffle, sums_of_partition

N_FILES = 32
#: Output partitions of the shuffle.
N_PARTITIONS = 32
#: Rows at scale 1: 500 MB of four numbers of 8 bytes.
ROWS = 15_625_000
#: Changes whenever the files do, so that old ones are not used.
VERSION = 1
_ANSWERS = "answers.json"


def columns(rows: int) -> dict[str, Any]:
    """Return the columns: a key that about four rows share, a group of ten rows, two numbers."""
    rng = np.random.default_rng(rows)
    spread = rng.integers(0, max(rows // 4, 1), rows) * 2_654_435_761 % 2**31
    return {
        "key": spread,
        "x": rng.random(rows),
        "y": rng.random(rows),
        "n": rng.integers(0, max(rows // 10, 1), rows),
    }


def right_answers(made: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of each work."""
    shuffle = of_shuffle([sums_of_partition(**made)]) | {"partitions": N_PARTITIONS}
    group = made["n"]
    counts, sums, totals = (
        np.bincount(group, weights=weights) for weights in (None, made["x"], made["y"])
    )
    (present,) = np.nonzero(counts)
    means = totals[present] / counts[present]
    aggregation = of_aggregation(present, sums[present], means, counts[present])
    return {"shuffle": shuffle, "aggregation": aggregation}


def prepared(folder: Path, scale: float) -> tuple[Path, dict[str, Any]]:
    """Return the folder of Parquet files of this scale, and the right answers; make both once."""
    rows = max(int(ROWS * scale), N_FILES)
    place = folder / f"rows-{rows}-version-{VERSION}"
    files = place / "files"
    if not (place / _ANSWERS).exists():
        shutil.rmtree(place, ignore_errors=True)
        files.mkdir(parents=True)
        made = columns(rows)
        bounds = np.linspace(0, rows, N_FILES + 1).astype(int)
        for number, (first, last) in enumerate(pairwise(bounds)):
            part = pa.table({name: values[first:last] for name, values in made.items()})
            # One row group a file, as large as most engines advise.
            pq.write_table(part, files / f"{number:02}.parquet", row_group_size=len(part))
        # Last: if this file is here, the others are whole.
        (place / _ANSWERS).write_text(json.dumps(right_answers(made)))
    return files, json.loads((place / _ANSWERS).read_text())
