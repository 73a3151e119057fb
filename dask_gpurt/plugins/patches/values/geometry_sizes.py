"""The size of geometries, of which Dask counts only the pointers.

Dask takes a polygon for 8 bytes. Then a worker seems empty while it is full: its outputs are
neither spilled in time nor placed by their size.

| what | why | taken back by |
|---|---|---|
| `dask.sizeof.sizeof._lookup`, `._lazy` | measures frames and series of GeoPandas |
its last holder |

The patch is global to the process; each worker holds it. It does not import GeoPandas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from dask.sizeof import sizeof

from dask_gpurt.process_patch import ProcessPatch


def _columns(frame: Any) -> list[Any]:
    return [frame.iloc[:, position].array for position in range(frame.shape[1])]


def _measure(
    stock: Callable[[Any], int], columns: Callable[[Any], list[Any]]
) -> Callable[[Any], int]:
    """Return a measure that adds the geometries in some columns to Dask's size."""
    # Not at import: this module brings pyarrow, which most workers do not need.
    from dask_gpurt.frames.geo.geometry import geometry_nbytes, is_geometry

    def measure(value: Any) -> int:
        geometries = [column for column in columns(value) if is_geometry(column.dtype)]
        return stock(value) + sum(map(geometry_nbytes, geometries))

    return measure


def _measure_geometries() -> Callable[[], None]:
    """Register the sizes, at once or when Dask first measures a value of GeoPandas."""
    before: dict[Any, Any] = {}

    def register() -> None:
        # Dask asks again for the same package below.
        sizeof._lazy.pop("geopandas", None)
        # The maker of the measured value has imported it.
        geopandas = sys.modules["geopandas"]
        for kind, columns in (
            (geopandas.GeoDataFrame, _columns),
            (geopandas.GeoSeries, lambda series: [series.array]),
        ):
            before[kind] = sizeof._lookup.get(kind)
            sizeof._lookup[kind] = _measure(sizeof.dispatch(kind), columns)

    # Another thread may be in the middle of the import.
    if hasattr(sys.modules.get("geopandas"), "GeoDataFrame"):
        register()
    else:
        sizeof.register_lazy("geopandas", register)

    def restore() -> None:
        sizeof._lazy.pop("geopandas", None)
        for kind, measure in before.items():
            sizeof._lookup.pop(kind, None)
            if measure is not None:
                sizeof._lookup[kind] = measure

    return restore


#: Held by each worker that measures geometries.
geometry_sizes = ProcessPatch(_measure_geometries)
