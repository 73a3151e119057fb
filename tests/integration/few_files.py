"""A program that shuffles between many workers of one process, with few open files.

It prints the rows of the result, their sum, and the runs on the data plane of the runtime.
"""

from __future__ import annotations

import sys

import dask
import numpy as np
import pandas as pd
from dask.dataframe import from_delayed
from distributed import Client, LocalCluster

import dask_gpurt

N_WORKERS = int(sys.argv[1])
N_ROWS = 1000


@dask.delayed
def frame(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    return pd.DataFrame({"key": rng.integers(0, 1000, N_ROWS), "number": number})


if __name__ == "__main__":
    options = {"n_workers": N_WORKERS, "threads_per_worker": 1, "processes": False}
    settings = {"gpurt.shuffle.transport": "comm", "distributed.comm.timeouts.connect": "60s"}
    with (
        dask.config.set(settings),
        LocalCluster(protocol="tcp://", dashboard_address=None, **options) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        parts = [frame(number) for number in range(2 * N_WORKERS)]
        lazy = from_delayed(parts, meta=pd.DataFrame({"key": [0], "number": [0]}))
        result = lazy.shuffle("key", npartitions=2 * N_WORKERS).compute()
        print(len(result), result.number.sum(), dask_gpurt.status(client)["runs"]["gpurt"])
