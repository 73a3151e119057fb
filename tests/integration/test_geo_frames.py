"""Shuffles of dask-geopandas run on our data plane, and give the results of GeoPandas."""

from __future__ import annotations

from functools import partial

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from tests.integration.comparing import on_our_plane, partitions

dask_geopandas = pytest.importorskip("dask_geopandas", reason="dask-geopandas is not installed")

import geopandas  # noqa: E402
from geopandas.testing import assert_geodataframe_equal  # noqa: E402
from shapely import box  # noqa: E402


@pytest.fixture
def points():
    rng = np.random.default_rng(0)
    frame = geopandas.GeoDataFrame(
        {
            "n": range(300),
            "key": rng.integers(0, 20, 300),
            "text": [f"p{i % 7}" for i in range(300)],
        },
        geometry=geopandas.points_from_xy(rng.uniform(0, 4, 300), rng.uniform(0, 4, 300)),
        crs="EPSG:3857",
        index=pd.Index(np.arange(300) * 10, name="row"),
    )
    return dask_geopandas.from_geopandas(frame, npartitions=5)


def test_shuffle_equals_one_by_tasks(sides, points):
    got = on_our_plane(sides, points.shuffle("key"), 1)
    with dask.config.set(scheduler="sync"):
        expected = list(dask.compute(*points.shuffle("key", shuffle_method="tasks").to_delayed()))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert_geodataframe_equal(one.sort_index(), other.sort_index())


def test_numbered_rows_keep_their_numbers(sides, points):
    """Stock Dask numbers them anew in each output. If it no longer does, so must the docs."""
    numbered = points.reset_index(drop=True)
    got, stock = (
        pd.concat(made(numbered.shuffle("key"))).set_index("n", append=True).index.sort_values()
        for made in (partial(on_our_plane, sides), partial(partitions, sides.stock))
    )
    frame = numbered.compute(scheduler="sync")
    expected = frame.set_index("n", append=True).index.sort_values()
    assert got.equals(expected)
    assert not stock.equals(expected)


def test_merge_keeps_geometries(sides, points):
    others = pd.DataFrame({"key": range(20), "height": np.arange(20) / 2})
    lazy = points.merge(dd.from_pandas(others, npartitions=3), on="key", broadcast=False)
    got = pd.concat(on_our_plane(sides, lazy)).set_index("n").sort_index()
    expected = points.compute(scheduler="sync").merge(others, on="key").set_index("n").sort_index()
    assert_geodataframe_equal(got, expected)


def test_shuffle_after_a_spatial_join(sides, points):
    areas = geopandas.GeoDataFrame(
        {"area": range(4)}, geometry=[box(x, 0, x + 1, 4) for x in range(4)], crs="EPSG:3857"
    )
    joined = dask_geopandas.sjoin(points, areas, predicate="within").shuffle("area")
    got = pd.concat(on_our_plane(sides, joined, 1))
    expected = geopandas.sjoin(points.compute(scheduler="sync"), areas, predicate="within")
    assert_geodataframe_equal(got.sort_index(), expected.sort_index())
