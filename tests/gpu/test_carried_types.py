"""Types that `carried_types` accepts have the casts in cuDF that an output needs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dask_gpurt.frames.device.carried_types import is_carried
from dask_gpurt.frames.device.device_contents import DeviceColumn
from tests.frames.emulated_device import EmulatedMemory
from tests.gpu.test_frames import NO_CUDF, needs_cudf, needs_libraries

if NO_CUDF is None:
    import cudf
    import pylibcudf

    from dask_gpurt.frames.device.cudf_ import CudfMemory, CudfTables

UNITS = ["s", "ms", "us", "ns"]
PLAIN = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
PLAIN += [np.dtype(name) for name in ("f4", "f8", "?", "O")]
PLAIN += [np.dtype(f"{kind}8[{unit}]") for kind in "Mm" for unit in UNITS]
NULLABLE = [pd.Int8Dtype(), pd.Int64Dtype(), pd.UInt16Dtype(), pd.Float32Dtype(), pd.BooleanDtype()]
STRINGS = [pd.StringDtype(), pd.StringDtype(na_value=np.nan), pd.StringDtype("python")]
ARROW = [pa.int8(), pa.uint64(), pa.float32(), pa.bool_(), pa.string(), pa.large_string()]
ARROW += [pa.timestamp("us"), pa.timestamp("ns", "UTC"), pa.duration("ms"), pa.date32()]
ARROW += [pa.decimal128(9, 2), pa.time64("us"), pa.null(), pa.list_(pa.int8()), pa.binary()]
ARROW += [pa.struct({"a": pa.int8()}), pa.dictionary(pa.int32(), pa.string())]


def is_cudfs(dtype):
    try:
        cudf.dtype(dtype)
    except TypeError:
        return False
    return True


def every_dtype():
    """Draw dtypes of cuDF that take no GPU to make, nested up to three deep."""
    plain = [*PLAIN, *NULLABLE, *STRINGS, *map(pd.ArrowDtype, ARROW)]
    leaves = st.sampled_from([dtype for dtype in plain if is_cudfs(dtype)])
    leaves |= st.sampled_from([pd.DatetimeTZDtype(unit, "Europe/Berlin") for unit in UNITS])
    leaves |= st.builds(cudf.CategoricalDtype, ordered=st.booleans())
    for kind, most in (("Decimal32Dtype", 9), ("Decimal64Dtype", 18), ("Decimal128Dtype", 38)):
        leaves |= st.builds(getattr(cudf, kind), st.integers(3, most), st.integers(0, 3))
    subtypes = st.sampled_from(["i8", "f4", "M8[ns]"])
    leaves |= st.builds(cudf.IntervalDtype, subtypes, closed=st.just("left"))

    def nested(inner):
        members = st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
        return st.builds(cudf.ListDtype, inner) | st.builds(cudf.StructDtype, members)

    return st.recursive(leaves, nested, max_leaves=3)


def column_of(dtype, n_rows):
    """Describe a column with the buffers that cuDF gives this type; all at offset 0."""
    if isinstance(dtype, cudf.ListDtype):
        children = (offsets(n_rows), column_of(dtype.element_type, n_rows))
        return DeviceColumn("LIST", n_rows, children=children)
    if isinstance(dtype, pd.StringDtype) or dtype.kind == "O":
        return DeviceColumn("STRING", n_rows, children=(offsets(n_rows),))
    type_id = pylibcudf.types.TypeId(cudf.utils.dtypes.dtype_to_pylibcudf_type(dtype).id())
    return DeviceColumn(type_id.name, n_rows, nbytes=n_rows * dtype.itemsize)


def offsets(n_rows):
    return DeviceColumn("INT32", n_rows + 1, nbytes=4 * (n_rows + 1))


@needs_libraries
def test_carried_lists_have_the_type_of_their_buffers():
    """The library reads no values to make a list column, so host memory does as a device's."""
    n_rows, n_lists = 4, 0
    memory = EmulatedMemory(1024)

    @settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
    @given(every_dtype().map(cudf.ListDtype))
    def check(dtype):
        nonlocal n_lists
        assume(is_carried(dtype))
        n_lists += 1
        table = CudfTables().view(memory, [column_of(dtype, n_rows)])
        found = cudf.DataFrame.from_pylibcudf(table, {"columns": ["a"]})["a"]
        # No cast of a list exists.
        assert found.dtype == dtype

    check()
    assert n_lists > 20


def missing_values(dtype):
    """Return three missing values. The constructor of a Series takes no time zones."""
    if isinstance(dtype, pd.DatetimeTZDtype):
        naive = cudf.Series([None] * 3, dtype=f"M8[{dtype.unit}]")
        return naive.dt.tz_localize("UTC").dt.tz_convert(str(dtype.tz))
    return cudf.Series([None] * 3, dtype=dtype)


@needs_cudf
def test_carried_types_come_back_from_their_buffers():
    @settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
    @given(every_dtype())
    def check(dtype):
        assume(is_carried(dtype))
        frame = cudf.DataFrame({"a": missing_values(dtype)})
        tables = CudfTables()
        table, kinds = tables.take_apart(frame, frame.iloc[:0])
        memory, columns, _ = tables.pack(table, CudfMemory.empty)
        again = tables.put_together(tables.view(memory, columns), kinds, frame.iloc[:0])
        # cuDF's own comparison takes neither lists nor decimals of 32 bits.
        assert again["a"].dtype == frame["a"].dtype
        assert again["a"].null_count == len(again) == 3

    check()
