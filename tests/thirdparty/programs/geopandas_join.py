"""A program with dask-geopandas: a spatial shuffle, a join of points with areas, a dissolve."""

import json

import dask_geopandas
import geopandas
import numpy as np
from distributed import Client
from shapely.geometry import box

if __name__ == "__main__":
    generator = np.random.default_rng(0)
    xy = generator.uniform(0, 4, (400, 2))
    points = geopandas.GeoDataFrame(
        {"value": np.arange(400)}, geometry=geopandas.points_from_xy(xy[:, 0], xy[:, 1])
    )
    areas = geopandas.GeoDataFrame(
        {"area": range(16)},
        geometry=[box(x, y, x + 1, y + 1) for x in range(4) for y in range(4)],
    )
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0"):
        lazy = dask_geopandas.from_geopandas(points, npartitions=5)
        near = lazy.spatial_shuffle(by="hilbert", npartitions=4)
        joined = dask_geopandas.sjoin(near, areas, predicate="within")
        sums = joined.groupby("area").value.sum().compute().sort_index()
        shuffled = joined.drop(columns="index_right").shuffle("area").compute()
        shape = lazy.dissolve().compute().geometry.iloc[0]
    print(
        json.dumps(
            {
                "sums": sums.tolist(),
                "values": shuffled.value.sort_values().tolist(),
                "type": type(shuffled).__name__,
                "bounds": shape.bounds,
            }
        )
    )
