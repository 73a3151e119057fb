"""A program that shuffles, rechunks and spills on a system that lacks something."""

from __future__ import annotations

#: Prints what the runtime did. `names` are functions of `os` that no worker may have.
PROGRAM = """
    import json
    import os

    import dask
    import dask.array as da
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd
    from distributed import Client, LocalCluster, wait

    import dask_gpurt

    SETTINGS = {{
        "gpurt.enabled": True,
        "gpurt.shuffle.memory": "64 KiB",
        "gpurt.shuffle.transport": {transport!r},
        "distributed.worker.memory.target": 0.01,
        "distributed.worker.memory.spill": False,
    }}

    def lacking(dask_worker):
        return not any(hasattr(os, name) for name in {names})

    def on_disk(dask_worker):
        return len(dask_worker.data.disk)

    if __name__ == "__main__":
        numbers = np.random.default_rng(0).integers(0, 1000, 100_000)
        frame = pd.DataFrame({{"key": numbers, "x": np.arange(100_000)}})
        with (
            dask.config.set(SETTINGS),
            LocalCluster(
                n_workers=2, threads_per_worker=1, processes={processes}, protocol="tcp://",
                memory_limit="1 GiB", dashboard_address=":0",
            ) as cluster,
            Client(cluster) as client,
        ):
            assert all(client.run(lacking).values())
            found = dd.from_pandas(frame, npartitions=6).shuffle("key").compute()
            found = found.sort_values("x").reset_index(drop=True)
            pd.testing.assert_frame_equal(found, frame)
            ones = da.ones((2000, 2000), chunks=(200, 2000)).rechunk((2000, 200), method="p2p")
            assert ones.sum().compute() == 4_000_000
            blocks = client.map(lambda n: np.full(1 << 20, n), range(8))
            wait(blocks)
            n_on_disk = sum(client.run(on_disk).values())
            totals = client.gather(client.map(np.sum, blocks))
            assert totals == [n << 20 for n in range(8)]
            status = dask_gpurt.status(client)
            links = [one["links"].values() for one in status["workers"].values() if one]
            print(json.dumps({{
                "runs": status["runs"],
                "paths": sorted({{link["path"] for some in links for link in some}}),
                "has_spilled": bool(n_on_disk and status["totals"]["spilled_nbytes"]),
                "not_ready": status["not_ready"],
            }}))
"""
