"""GeoDataFrames keep their geometries, reference systems and active column in a shuffle."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dask_gpurt.frames.adapter import Piece, Selection
from tests.conformance.frame_suite import HostFrameSuite
from tests.frames.pandas_rows import PandasRows

geopandas = pytest.importorskip("geopandas", reason="GeoPandas is not installed")

from geopandas.testing import assert_geodataframe_equal  # noqa: E402
from shapely import Point, Polygon, box, from_wkt, get_srid, set_srid  # noqa: E402

from dask_gpurt.frames.geo.geo_frames import GeoFrames  # noqa: E402


def adapter_for(frame):
    return GeoFrames(frame.iloc[:0], "slot", drop_column=True)


def there_and_back(frame, meta=None):
    """Return the rows of a frame after they were packed, unpacked and concatenated."""
    adapter = adapter_for(frame if meta is None else meta)
    opened = adapter.open(frame)
    rows = np.arange(len(frame), dtype=np.intp)
    (packed,) = opened.gather([Selection(rows, leaves=True)])
    body = adapter.unpack(opened.layout_key, packed)
    return adapter.concatenate([Piece(body, 0, len(frame))])


class TestPoints(PandasRows, HostFrameSuite):
    def adapter(self, frame):
        return adapter_for(frame)

    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        return geopandas.GeoDataFrame(
            {"slot": rng.integers(0, self.n_slots, rows), "n": np.arange(rows)},
            geometry=geopandas.points_from_xy(rng.random(rows), rng.random(rows)),
            crs="EPSG:3857",
        )

    def assert_equal(self, got, expected):
        assert_geodataframe_equal(got, expected)


class TestSeveralKindsOfGeometry(TestPoints):
    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        kinds = [None, Point(1, 2), box(0, 0, 1, 1), from_wkt("LINESTRING Z (0 0 1, 2 2 3)")]
        return geopandas.GeoDataFrame(
            {
                "slot": rng.integers(0, self.n_slots, rows),
                "start": geopandas.GeoSeries([Point(i, 0) for i in range(rows)]),
                "shape": geopandas.GeoSeries([kinds[i % 4] for i in range(rows)], crs="EPSG:4326"),
            },
            geometry="shape",
        )


GEOMETRIES = {
    "missing": [None, None],
    "empty": [Point(), Polygon()],
    "collection": [from_wkt("GEOMETRYCOLLECTION (POINT (1 1), LINESTRING (0 0, 1 1))"), None],
    "hole": [from_wkt("POLYGON ((0 0, 9 0, 9 9, 0 0), (2 1, 3 1, 3 2, 2 1))"), Point(0, 0)],
    "height": [Point(1, 2, 3), Point(1, 2)],
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries_of_any_kind_come_back(name):
    frame = geopandas.GeoDataFrame({"slot": [0, 0]}, geometry=GEOMETRIES[name])
    got = there_and_back(frame)
    expected = frame.drop(columns="slot").set_index(pd.Index([0, 1]))
    assert_geodataframe_equal(got, expected)
    assert got.geometry.to_wkt().equals(expected.geometry.to_wkt())


def test_srid_of_a_geometry_comes_back():
    frame = geopandas.GeoDataFrame({"slot": [0]}, geometry=[set_srid(Point(1, 2), 4326)])
    assert get_srid(there_and_back(frame).geometry.iloc[0]) == 4326


@pytest.mark.parametrize("crs", [None, "EPSG:25832", "+proj=laea +lat_0=52 +lon_0=10", "OGC:CRS84"])
def test_reference_system_of_the_data_wins_over_that_of_the_meta(crs):
    frame = geopandas.GeoDataFrame({"slot": [0]}, geometry=[Point(1, 2)], crs=crs)
    got = there_and_back(frame, meta=frame.set_crs("EPSG:4326", allow_override=True))
    assert got.crs == frame.crs


def test_frame_without_its_only_geometry_is_a_frame_of_pandas():
    frame = geopandas.GeoDataFrame({"a": [1]}, geometry=[Point(1, 2)])
    adapter = GeoFrames(frame.iloc[:0], "geometry", drop_column=True)
    assert type(adapter.concatenate([])) is pd.DataFrame


def test_empty_result_keeps_the_active_column():
    frame = geopandas.GeoDataFrame(
        {"slot": [0], "a": geopandas.GeoSeries([Point(1, 2)])}, geometry="a", crs="EPSG:4326"
    )
    got = adapter_for(frame).concatenate([])
    assert (got.active_geometry_name, got.crs) == ("a", frame.crs)


def test_frame_of_pandas_may_have_geometries():
    from dask_gpurt.frames.pandas_ import PandasFrames

    shapes = geopandas.array.from_shapely([Point(1, 2), None], crs="EPSG:4326")
    frame = pd.DataFrame({"slot": [0, 0], "shape": shapes}, index=pd.Index([0, 1]))
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    body = adapter.open(frame).gather([Selection(np.arange(2), leaves=False)])[0]
    got = adapter.concatenate([Piece(body, 0, 2)])
    pd.testing.assert_frame_equal(got, frame.drop(columns="slot"))
    assert body.objects == []
