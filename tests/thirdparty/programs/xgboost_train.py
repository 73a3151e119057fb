"""A program with XGBoost's Dask interface, on shuffled frames and rechunked arrays."""

import json

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, wait
from xgboost import dask as dxgb

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    # With few distinct values in a column, histograms do not depend on the workers' rows.
    frame = pd.DataFrame(generator.integers(0, 8, (2000, 5)), columns=list("abcde"))
    frame["target"] = frame.a * 2 - frame.b + (frame.c > 3) * 5
    parameters = {"objective": "reg:squarederror", "tree_method": "hist", "max_depth": 3}
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        shuffled = dd.from_pandas(frame, npartitions=6).shuffle("a", npartitions=4).persist()
        wait(shuffled)
        features = shuffled[list("abcde")]
        matrix = dxgb.DaskDMatrix(client, features, shuffled["target"])
        trained = dxgb.train(
            client, parameters, matrix, num_boost_round=8, evals=[(matrix, "train")]
        )
        predicted = dxgb.predict(client, trained, features).compute()

        rows = da.from_array(frame.to_numpy(dtype="f4"), chunks=(500, 2)).rechunk((400, 6))
        model = dxgb.DaskXGBRegressor(n_estimators=8, max_depth=3, tree_method="hist")
        model.client = client
        model.fit(rows[:, :5], rows[:, 5])
        from_arrays = model.predict(rows[:, :5]).compute()
    print(
        json.dumps(
            {
                "history": trained["history"]["train"]["rmse"],
                "predicted": predicted.sort_index().to_numpy().astype(float)[:50].tolist(),
                "rows": len(predicted),
                "from_arrays": from_arrays.astype(float)[:50].tolist(),
            }
        )
    )
