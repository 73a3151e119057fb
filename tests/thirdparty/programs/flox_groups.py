"""A program with flox: groups of arrays by each of its three methods, and by two labels."""

import json

import dask.array as da
import flox
import numpy as np
from distributed import Client

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    values = generator.normal(size=(6, 360))
    months = np.repeat(np.tile(np.arange(12), 3), 10)
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        blocks = da.from_array(values, chunks=(3, 40))
        result = {}
        for method in ("map-reduce", "cohorts"):
            for function in ("sum", "nanmean", "var", "argmax"):
                got, *_ = flox.groupby_reduce(blocks, months, func=function, method=method)
                result[f"{method} {function}"] = np.asarray(got).tolist()
        # The blockwise method needs each group in one chunk.
        order = np.sort(months)
        in_groups = blocks.rechunk((6, 60), method="p2p")
        got, *_ = flox.groupby_reduce(in_groups, order, func="nanmedian", method="blockwise")
        result["blockwise"] = np.asarray(got).tolist()
        got, *_ = flox.groupby_reduce(
            blocks,
            months,
            da.from_array(np.arange(360) % 2, chunks=40),
            func="max",
            expected_groups=(np.arange(12), np.arange(2)),
        )
        result["two labels"] = np.nan_to_num(np.asarray(got)).tolist()
        scan = flox.groupby_scan(blocks, months, func="nancumsum")
        result["scan"] = np.asarray(scan)[:, -5:].tolist()
    print(json.dumps(result))
