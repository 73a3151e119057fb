"""A program with LightGBM's Dask estimators, whose workers connect to one another."""

import json

import dask.array as da
import lightgbm
import numpy as np
from distributed import Client

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    # With few distinct values in a column, bins do not depend on the workers' rows.
    features = generator.integers(0, 8, (2000, 5)).astype("f8")
    target = features[:, 0] * 2 - features[:, 1] + (features[:, 2] > 3) * 5
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        rows = da.from_array(features, chunks=(250, 2)).rechunk((500, 5))
        model = lightgbm.DaskLGBMRegressor(
            client=client, n_estimators=8, num_leaves=7, min_data_in_bin=1, verbose=-1
        )
        model.fit(rows, da.from_array(target, chunks=500))
        predicted = model.predict(rows).compute()
    print(json.dumps({"predicted": predicted[:100].tolist(), "rows": len(predicted)}))
