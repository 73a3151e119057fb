"""A program that rechunks, reduces and multiplies arrays whose chunks are sparse."""

import json

import dask.array as da
import numpy as np
import sparse
from distributed import Client

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    dense = generator.integers(0, 9, (60, 80)) * (generator.random((60, 80)) > 0.9)
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        blocks = da.from_array(dense, chunks=(10, 80)).map_blocks(sparse.COO)
        # Stock Dask's peer-to-peer rechunk cannot carry such chunks.
        turned = blocks.rechunk((60, 10), method="tasks")
        result = {
            "sum": turned.sum(axis=0).compute().todense().tolist(),
            "same": bool((turned.compute().todense() == dense).all()),
            "type": type(turned.compute()).__name__,
            "product": float(blocks.dot(blocks.T).sum().compute()),
            "slices": blocks[5:25, ::3].compute().todense().sum(axis=1).tolist(),
        }
    print(json.dumps(result))
