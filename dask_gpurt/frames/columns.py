"""Decomposition of one pandas column into plain memory, and composition from it.

A column consists of at most three things. *Parts* are one-dimensional NumPy arrays of a fixed-width
type, with one entry a row. The others are an *Arrow* array, and *objects*, an array that only
pickle can carry. Its `Layout` says how to compose them. This module knows all pandas types. It does
not move rows (`frames.gather`), does not group columns (`frames.pandas_`), and does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from dask_gpurt.frames.gather import RowCounts
from dask_gpurt.frames.geo.geometry import (
    arrow_of_geometry,
    crs_name,
    geometry_of_arrow,
    is_geometry,
)
from dask_gpurt.frames.pickling import Pickling

Part = npt.NDArray[Any]

#: The first detail of an Arrow column: pandas' strings, or pandas' columns of any Arrow type.
_ARROW = ("string", "arrow")
#: NumPy's spelling of a plain type: numbers, booleans, datetimes and timedeltas.
_PLAIN_DTYPE = re.compile(r"[<>|][biufcmM]\d{1,2}(\[\d*[A-Za-z]+\])?")
_PLAIN = Pickling()


@dataclass(frozen=True)
class Layout:
    """The recipe for one column. It has plain values only, so it can travel in a header.

    Attributes
    ----------
    kind
        `plain`, `wall` (datetimes with a zone, and periods),
        `masked`, `categorical`, `interval`, `arrow`, `geometry` or `objects`.
    parts
        NumPy type string of each fixed-width part.
    arrow, objects
        The column has an Arrow array, or objects.
    detail
        Additional data of the kind: a dtype string, categories, and so on.
    children
        Layouts of the two ends of an interval.
    """

    kind: str
    parts: tuple[str, ...] = ()
    arrow: bool = False
    objects: bool = False
    detail: tuple[Any, ...] = ()
    children: tuple[Layout, ...] = ()

    def to_plain(self) -> list[Any]:
        children = [child.to_plain() for child in self.children]
        return [self.kind, list(self.parts), self.arrow, self.objects, list(self.detail), children]

    @staticmethod
    def from_plain(plain: Sequence[Any]) -> Layout:
        """Read the result of `to_plain` of a peer.

        Raises
        ------
        ValueError
            The layout is invalid.
        """
        kind, parts, arrow, objects, detail, children = plain
        layout = Layout(
            kind=kind,
            parts=tuple(map(_plain_dtype, parts)),
            arrow=bool(arrow),
            objects=bool(objects),
            detail=tuple(detail),
            children=tuple(Layout.from_plain(child) for child in children),
        )
        if kind not in _COMPOSE or not _is_consistent(layout):
            raise ValueError(f"no column is carried like {plain!r}"[:200])
        return layout


def _plain_dtype(text: Any) -> str:
    """Check that a text names a plain NumPy type in the notation of `dtype.str`.

    NumPy accepts far more: lists of fields, Python objects, and text that it evaluates.
    """
    if not (isinstance(text, str) and _PLAIN_DTYPE.fullmatch(text)):
        raise ValueError(f"no NumPy type of plain memory: {text!r}"[:200])
    try:
        return str(np.dtype(text).str)
    except TypeError as error:
        raise ValueError(f"no NumPy type of plain memory: {text!r}") from error


def _is_consistent(layout: Layout) -> bool:
    """Return whether the fields of a layout fit one another, as those from `decompose` do."""
    has_arrow = layout.kind in ("arrow", "geometry")
    if (layout.arrow, layout.objects) != (has_arrow, layout.kind == "objects"):
        return False
    return _HAS_FITTING_FIELDS[layout.kind](layout)


def _fits_plain(layout: Layout) -> bool:
    return len(layout.parts) == 1


def _fits_wall(layout: Layout) -> bool:
    dtype = _dtype_named(layout.detail)
    return layout.parts == ("<i8",) and isinstance(dtype, (pd.DatetimeTZDtype, pd.PeriodDtype))


def _fits_masked(layout: Layout) -> bool:
    dtype = getattr(_dtype_named(layout.detail), "numpy_dtype", None)
    return layout.parts[1:] == ("|b1",) and dtype == np.dtype(layout.parts[0])


def _fits_categorical(layout: Layout) -> bool:
    has_codes = [np.dtype(part).kind for part in layout.parts] == ["i"]
    return has_codes and [type(one) for one in layout.detail] == [bool, bool, bytes]


#: Kinds of columns that may be the ends of intervals. Others, with masks, travel as objects.
_ENDS = frozenset({"plain", "wall"})


def _fits_interval(layout: Layout) -> bool:
    parts = tuple(part for child in layout.children for part in child.parts)
    is_closed = layout.detail in (("left",), ("right",), ("both",), ("neither",))
    ends = {child.kind for child in layout.children}
    return is_closed and parts == layout.parts and ends <= _ENDS and len(parts) == 2


def _fits_arrow(layout: Layout) -> bool:
    return not layout.parts and len(layout.detail) > 1 and layout.detail[0] in _ARROW


def _fits_geometry(layout: Layout) -> bool:
    return not layout.parts and [type(one) for one in layout.detail] == [str]


def _fits_objects(layout: Layout) -> bool:
    return not layout.parts


_HAS_FITTING_FIELDS = {
    "plain": _fits_plain,
    "wall": _fits_wall,
    "masked": _fits_masked,
    "categorical": _fits_categorical,
    "interval": _fits_interval,
    "arrow": _fits_arrow,
    "geometry": _fits_geometry,
    "objects": _fits_objects,
}


def _dtype_named(detail: tuple[Any, ...]) -> Any:
    """Return the pandas type that the only detail of a layout names, or None."""
    if len(detail) != 1 or not isinstance(detail[0], str):
        return None
    try:
        return pd.api.types.pandas_dtype(detail[0])
    except (TypeError, ValueError, KeyError):
        return None


@dataclass
class Column:
    """One decomposed column. The arrays are the frame's own memory, without a copy."""

    layout: Layout
    parts: list[Part | RowCounts] = field(default_factory=list)
    arrow: pa.ChunkedArray | None = None
    objects: Any = None


def decompose_index(level: pd.Index, pickling: Pickling = _PLAIN, what: str = "an index") -> Column:
    """Decompose an index, or one level of an index."""
    if isinstance(level, pd.RangeIndex):
        return Column(Layout("plain", ("<i8",)), [RowCounts(level.start, level.step)])
    return decompose(np_or_extension(level), None, pickling, what)


def decompose(
    values: Any, expected: Any = None, pickling: Pickling = _PLAIN, what: str = "a column"
) -> Column:
    """Decompose one column.

    Parameters
    ----------
    values
        The array of a column or index: `ndarray` or pandas `ExtensionArray`.
    expected
        The column's type in the frame's meta. Categories that equal the expected ones do not
        travel.
    pickling
        Used for categories that are objects.
    what
        Name of the column in error messages.
    """
    dtype = values.dtype
    if isinstance(dtype, np.dtype):
        return _decompose_numpy(values)
    if isinstance(dtype, pd.CategoricalDtype):
        return _decompose_categorical(values, expected, pickling, what)
    if isinstance(dtype, (pd.DatetimeTZDtype, pd.PeriodDtype)):
        return _decompose_wall(values)
    if isinstance(dtype, pd.IntervalDtype):
        return _decompose_interval(values)
    if is_masked(values):
        data, mask = values._data, values._mask
        layout = Layout("masked", (data.dtype.str, mask.dtype.str), detail=(str(dtype),))
        return Column(layout, [data, mask])
    if _is_arrow(dtype):
        return Column(
            Layout("arrow", arrow=True, detail=_arrow_detail(dtype)),
            arrow=_chunked(values.__arrow_array__()),
        )
    if is_geometry(dtype):
        layout = Layout("geometry", arrow=True, detail=(crs_name(values),))
        return Column(layout, arrow=_chunked(arrow_of_geometry(values)))
    return _decompose_objects(values)


def compose(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    """Compose one column: an `ndarray` or `ExtensionArray` over the given memory."""
    return _COMPOSE[layout.kind](layout, parts, arrow, objects)


def np_or_extension(values: Any) -> Any:
    """Return the array of an Index or Series; a NumPy array if pandas only wraps one."""
    array = values.array
    # Strings held by Python are a subclass, with a dtype of their own.
    return array.to_numpy() if type(array) is pd.arrays.NumpyExtensionArray else array


def _decompose_numpy(values: Any) -> Column:
    if values.dtype.kind in "mM":
        # Blocks of datetimes hold an array of pandas over plain memory.
        values = np.asarray(values)
    elif not isinstance(values, np.ndarray):
        values = values.to_numpy()
    if values.dtype.kind in "biufcmM":
        return Column(Layout("plain", (values.dtype.str,)), [values])
    return _decompose_objects(values)


def _decompose_wall(values: Any) -> Column:
    name = str(values.dtype)
    # Some zones do not survive a round trip through their names, such as dateutil's files. Columns
    # of such a zone travel as objects.
    if not _same_dtype(name, values.dtype):
        return _decompose_objects(values)
    return Column(Layout("wall", ("<i8",), detail=(name,)), [values.asi8])


def _decompose_interval(values: Any) -> Column:
    ends = [decompose(np_or_extension(end)) for end in (values.left, values.right)]
    if not {end.layout.kind for end in ends} <= _ENDS:
        return _decompose_objects(values)
    layout = Layout(
        "interval",
        tuple(part for end in ends for part in end.layout.parts),
        detail=(values.dtype.closed,),
        children=tuple(end.layout for end in ends),
    )
    return Column(layout, [part for end in ends for part in end.parts])


def _decompose_objects(values: Any) -> Column:
    # A NumPy array of objects, or an extension array without a layout here (sparse arrays, strings
    # held by Python, types of other libraries).
    kind = type(values)
    detail = (f"{kind.__module__}.{kind.__qualname__} of {values.dtype}",)
    return Column(Layout("objects", objects=True, detail=detail), objects=values)


def _decompose_categorical(values: Any, expected: Any, pickling: Pickling, what: str) -> Column:
    dtype = values.dtype
    same = (
        isinstance(expected, pd.CategoricalDtype)
        and expected.ordered == dtype.ordered
        and expected.categories.dtype == dtype.categories.dtype
        and _are_same(expected.categories, dtype.categories)
    )
    categories = b"" if same else _pack_index(dtype.categories, pickling, what)
    codes = values.codes
    layout = Layout(
        "categorical", (codes.dtype.str,), detail=(bool(dtype.ordered), bool(same), categories)
    )
    return Column(layout, [codes])


def _are_same(one: pd.Index, other: pd.Index) -> bool:
    """Return whether two indexes are equal, including the types of objects."""
    if not one.equals(other):
        return False
    # A member of an IntEnum equals its number, and a string equals one of a subclass.
    return one.dtype != object or list(map(type, one)) == list(map(type, other))


def _pack_index(index: pd.Index, pickling: Pickling = _PLAIN, what: str = "a column") -> bytes:
    """Encode categories: as an Arrow stream if Arrow restores them exactly, else as a pickle."""
    try:
        table = pa.table({"categories": pa.array(index)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        packed: bytes = b"A" + str(index.dtype).encode() + b"\0" + sink.getvalue().to_pybytes()
        back = _unpack_index(packed)
        if back.dtype == index.dtype and _are_same(back, index):
            return packed
    except (pa.ArrowException, TypeError, ValueError, AttributeError):
        pass
    return b"P" + pickling.dump(index, what)


def _unpack_index(packed: bytes, pickling: Pickling = _PLAIN) -> pd.Index:
    if packed[:1] == b"P":
        index: pd.Index = pickling.loads(packed[1:])
        return index
    name, _, stream = packed[1:].partition(b"\0")
    with pa.ipc.open_stream(stream) as reader:
        column = reader.read_all()["categories"]
    return pd.Index(column.to_pandas().array, dtype=name.decode())


class Categories:
    """A cache of the categories of one run's columns.

    Parameters
    ----------
    pickling
        Used for categories that are objects.
    """

    def __init__(self, pickling: Pickling = _PLAIN) -> None:
        self._pickling = pickling
        self._read: dict[bytes, pd.Index] = {}

    def of(self, layout: Layout, expected: Any) -> pd.Index:
        """Return the categories of a categorical column, possibly those of its meta."""
        _, same, packed = layout.detail
        if same:
            return expected.categories
        index = self._read.get(packed)
        if index is None:
            index = self._read.setdefault(packed, _unpack_index(packed, self._pickling))
        return index


def _compose_categorical(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    raise TypeError("a categorical column needs its dtype: use compose_categorical()")


def compose_categorical(codes: Part, dtype: pd.CategoricalDtype) -> pd.Categorical:
    return pd.Categorical.from_codes(codes, dtype=dtype, validate=False)  # type: ignore[call-overload, no-any-return]


def _compose_plain(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    return parts[0]


def _compose_wall(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    dtype = pd.api.types.pandas_dtype(layout.detail[0])
    if isinstance(dtype, pd.PeriodDtype):
        return pd.arrays.PeriodArray(parts[0], dtype=dtype)  # type: ignore[arg-type]
    assert isinstance(dtype, pd.DatetimeTZDtype)
    instants = parts[0].view(f"M8[{dtype.unit}]")
    wrap = getattr(pd.arrays.DatetimeArray, "_simple_new", None)
    if wrap is not None:
        return wrap(instants, dtype=dtype)
    # The public method copies once.
    return pd.DatetimeIndex(instants).tz_localize("UTC").tz_convert(dtype.tz).array


def _compose_masked(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    dtype = pd.api.types.pandas_dtype(layout.detail[0])
    array_type = dtype.construct_array_type()  # type: ignore[union-attr]
    return array_type(parts[0], parts[1].view(np.bool_), copy=False)  # type: ignore[call-arg]


def _compose_interval(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    ends = []
    first = 0
    for child in layout.children:
        last = first + len(child.parts)
        ends.append(compose(child, parts[first:last], None, None))
        first = last
    return pd.arrays.IntervalArray.from_arrays(*ends, closed=layout.detail[0])


def _compose_arrow(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    kind, missing = layout.detail[:2]
    if kind == "string":
        na_value = np.nan if missing == "nan" else pd.NA
        return pd.StringDtype("pyarrow", na_value=na_value).__from_arrow__(arrow)
    return pd.arrays.ArrowExtensionArray(_chunked(arrow))  # type: ignore[attr-defined]


def _compose_geometry(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    return geometry_of_arrow(arrow, layout.detail[0])


def _compose_objects(layout: Layout, parts: Sequence[Part], arrow: Any, objects: Any) -> Any:
    return objects


_COMPOSE = {
    "plain": _compose_plain,
    "wall": _compose_wall,
    "masked": _compose_masked,
    "categorical": _compose_categorical,
    "interval": _compose_interval,
    "arrow": _compose_arrow,
    "geometry": _compose_geometry,
    "objects": _compose_objects,
}


def is_masked(values: Any) -> bool:
    return (
        isinstance(
            values,
            (pd.arrays.IntegerArray, pd.arrays.FloatingArray, pd.arrays.BooleanArray),
        )
        and hasattr(values, "_data")
        and hasattr(values, "_mask")
    )


def _is_arrow(dtype: Any) -> bool:
    if isinstance(dtype, pd.StringDtype):
        return bool(dtype.storage == "pyarrow")
    return isinstance(dtype, pd.ArrowDtype)


def _arrow_detail(dtype: Any) -> tuple[str, ...]:
    if isinstance(dtype, pd.StringDtype):
        missing = "NA" if getattr(dtype, "na_value", pd.NA) is pd.NA else "nan"
        return ("string", missing)
    # Includes the type: columns of two types have different shapes, and Arrow joins only one type.
    return ("arrow", "NA", str(dtype.pyarrow_dtype))


def _chunked(array: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def _same_dtype(name: str, dtype: Any) -> bool:
    return bool(_dtype_named((name,)) == dtype)
