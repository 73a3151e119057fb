"""A slow program with three causes: a slow link, a key with too many rows, and too little memory.

The guide `docs/guides/slow-program.md` finds them one by one. It runs on `benchmarks.slow_cluster`.
"""

from __future__ import annotations

import argparse

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

N_PARTS, N_ROWS, N_USERS = 24, 1_200_000, 300_000
#: Share of visits by people without an account: all of them have the user number 0.
UNKNOWN_SHARE = 0.4


def visits(number: int, rows: int) -> pd.DataFrame:
    """Return a part of the table of visits."""
    rng = np.random.default_rng(number)
    user = np.where(rng.random(rows) < UNKNOWN_SHARE, 0, rng.integers(1, N_USERS, rows))
    columns = {name: rng.random(rows) for name in ("seconds", "scrolled", "score")}
    return pd.DataFrame({"user": user, **columns})


def users() -> pd.DataFrame:
    """Return the table of users. User 0 stands for all without an account."""
    rng = np.random.default_rng(0)
    return pd.DataFrame({"user": np.arange(N_USERS), "age": rng.integers(18, 90, N_USERS)})


def score_by_age(drops_unknown: bool) -> pd.Series:
    """Return the mean score of visits by the age of the user."""
    seen = dd.from_map(visits, range(N_PARTS), rows=N_ROWS, meta=visits(0, 1).iloc[:0])
    if drops_unknown:
        seen = seen[seen.user > 0]
    known = dd.from_pandas(users(), npartitions=N_PARTS)
    joined = seen.merge(known, on="user", shuffle_method="p2p", broadcast=False)
    found: pd.Series = joined.groupby("age").score.mean().compute()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", help="address of the scheduler")
    parser.add_argument("--drop-unknown", action="store_true", help="leave out user 0")
    parser.add_argument("--memory", default="24 MiB", help="gpurt.shuffle.memory")
    options = parser.parse_args()
    with dask.config.set({"gpurt.shuffle.memory": options.memory}), Client(options.address):
        mean = score_by_age(options.drop_unknown)
    print(f"mean score of {len(mean)} ages: {mean.mean():.4f}")


if __name__ == "__main__":
    main()
