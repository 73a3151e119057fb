"""Contract tests of Dask's registry of sizes, and tests of the sizes of geometries."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from dask.sizeof import sizeof

from dask_gpurt.plugins.patches.values.geometry_sizes import geometry_sizes

geopandas = pytest.importorskip("geopandas", reason="GeoPandas is not installed")

import shapely  # noqa: E402

N = 2_000

AFTER_THE_IMPORT = """
import sys
from dask.sizeof import sizeof
from dask_gpurt.plugins.patches.values.geometry_sizes import geometry_sizes
release = geometry_sizes.hold(sizeof)
assert "geopandas" not in sys.modules
import geopandas
frame = geopandas.GeoDataFrame(geometry=geopandas.points_from_xy(range(1000), range(1000)))
assert sizeof(frame) > 200_000
release()
assert sizeof(frame) < 20_000
"""

TWO_HOLDERS = """
import geopandas
from dask.sizeof import sizeof
from dask_gpurt.plugins.patches.values.geometry_sizes import geometry_sizes
frame = geopandas.GeoDataFrame(geometry=geopandas.points_from_xy(range(1000), range(1000)))
before = sizeof(frame)
one, other = geometry_sizes.hold(sizeof), geometry_sizes.hold(sizeof)
one()
assert sizeof(frame) > 10 * before
other()
assert sizeof(frame) == before
"""


def areas(n_corners):
    points = shapely.points(np.arange(N), np.arange(N))
    return geopandas.GeoDataFrame(
        {"n": range(N)}, geometry=shapely.buffer(points, 0.1, quad_segs=n_corners // 4)
    )


@pytest.fixture
def held():
    release = geometry_sizes.hold(sizeof)
    yield
    release()


def test_more_corners_take_more_bytes(held):
    small, large = sizeof(areas(16)), sizeof(areas(64))
    assert large - small == pytest.approx(48 * 24 * N, rel=0.05)


def test_a_series_counts_as_much_as_its_column(held):
    frame = areas(16)
    assert sizeof(frame.geometry) > 0.9 * sizeof(frame)


def test_missing_geometries_and_empty_frames_have_a_size(held):
    frame = geopandas.GeoDataFrame({"n": range(2)}, geometry=[None, None])
    assert sizeof(frame) > sizeof(frame.iloc[:0]) > 0


@pytest.mark.parametrize("script", [AFTER_THE_IMPORT, TWO_HOLDERS], ids=["lazy", "two holders"])
def test_sizes_come_and_go_with_their_holders(script):
    """In a process of its own: workers of other tests may still hold the patch in this one."""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
