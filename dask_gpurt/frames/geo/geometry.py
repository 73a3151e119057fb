"""Columns of geometries as Arrow arrays, and back.

A geometry is written as well-known binary (WKB), the format in which GeoPandas pickles it. Each one
is written once and read once, on its way from an input partition to its output. In between, rows
are bytes of Arrow, which are gathered, joined and written to disk without objects of Python.

`frames.columns` asks this module. Workers ask it for sizes, of which Dask counts only pointers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dask_gpurt.frames.adapter import mean_nbytes

#: Bytes of a geometry besides its coordinates: objects of Python and of GEOS. By the growth of a
#: process with shapely 2.2, they are 192 for a point and 288 for a polygon.
_GEOMETRY_NBYTES = 250
#: By the same growth: 696 bytes for a polygon of 17 corners, 1,847 for one of 65.
_COORDINATE_NBYTES = 24


def is_geometry(dtype: Any) -> bool:
    """Return whether this is GeoPandas' type of a column. Does not import GeoPandas."""
    kind = type(dtype)
    return kind.__name__ == "GeometryDtype" and kind.__module__.startswith("geopandas.")


def arrow_of_geometry(values: Any) -> pa.Array | pa.ChunkedArray:
    """Return the geometries of a `GeometryArray` as WKB. A missing geometry is a missing value."""
    import shapely

    # Offsets of 64 bits: shapes of coasts or rivers have megabytes each.
    written = shapely.to_wkb(np.asarray(values), include_srid=True)
    return pa.array(written, type=pa.large_binary())


def geometry_of_arrow(array: pa.Array, crs: str) -> Any:
    """Return the `GeometryArray` of `arrow_of_geometry`, with the given reference system."""
    import shapely
    from geopandas.array import GeometryArray

    read = shapely.from_wkb(array.to_numpy(zero_copy_only=False))
    return GeometryArray(read, crs=_crs_named(crs) if crs else None)


def geometry_nbytes(values: Any) -> int:
    """Return the bytes of the objects in a `GeometryArray`, from a sample."""
    import shapely

    def nbytes(geometry: Any) -> int:
        return _GEOMETRY_NBYTES + _COORDINATE_NBYTES * int(shapely.get_num_coordinates(geometry))

    return int(mean_nbytes(np.asarray(values), nbytes) * len(values))


def crs_name(values: Any) -> str:
    """Return the text that stands for a column's reference system, or "" if it has none."""
    crs = values.crs
    return "" if crs is None else str(crs.srs)


@lru_cache(maxsize=64)
def _crs_named(text: str) -> Any:
    # To parse a text takes up to milliseconds. Columns of GeoPandas share such objects.
    from pyproj import CRS

    return CRS.from_user_input(text)
