"""Seconds of a merge of two large DataFrames on an unsorted key, stock against the runtime."""

from __future__ import annotations

import numpy as np
import pandas as pd

from benchmarks.harness import arguments, compare, two_clusters, write_json
from benchmarks.shuffle import frame


def left_part(seed: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"key": rng.integers(0, 1 << 24, rows), "left": rng.random(rows)})


def right_part(seed: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng([seed, 1])
    return pd.DataFrame({"key": rng.integers(0, 1 << 24, rows), "right": rng.random(rows)})


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = int(1_000_000 * options.scale)
    with two_clusters() as sides:
        timing = compare(
            sides,
            "merge of two 16M-row frames, 16 partitions each",
            lambda: frame(left_part, 16, rows) + frame(right_part, 16, rows),
            lambda inputs: inputs[0].merge(inputs[1], on="key", broadcast=False),
            repeats=options.repeats,
            target=2.0,
        )
    write_json(options.json, [timing])


if __name__ == "__main__":
    main()
