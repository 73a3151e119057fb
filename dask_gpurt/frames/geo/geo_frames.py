"""The adapter for GeoDataFrames: pandas frames with an active column of geometries.

`frames.pandas_` moves the rows, and `frames.geo.geometry` converts the geometries.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dask_gpurt.frames.adapter import Empty, Piece, fresh
from dask_gpurt.frames.pandas_ import PandasFrames


class GeoFrames(PandasFrames):
    """The adapter for the GeoDataFrames of one shuffle."""

    def concatenate(self, pieces: Sequence[Piece], empty: Empty = fresh) -> pd.DataFrame:
        frame = super().concatenate(pieces, empty)
        # A meta without any column of geometries is a frame of pandas.
        if type(frame) is type(self._result_meta):
            return frame
        from geopandas import GeoDataFrame

        active = self._result_meta.active_geometry_name
        return GeoDataFrame(frame, geometry=active, copy=False)
