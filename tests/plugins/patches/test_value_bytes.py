"""Values are measured and serialized by the functions of Dask that do it for stock."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from distributed.protocol.serialize import (
    deserialize_bytes,
    merge_and_deserialize,
    serialize_and_split,
    serialize_bytelist,
)

from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.plugins.patches.values import value_bytes

VIEW = memoryview(np.arange(6.0).reshape(2, 3))


def test_value_with_a_serializer_is_serialized_as_dask_spills_it():
    assert list(inspect.signature(serialize_and_split).parameters) == [
        "x",
        "serializers",
        "on_error",
        "context",
        "size",
    ]
    assert "serialize_and_split(x, **kwargs)" in inspect.getsource(serialize_bytelist)
    source = inspect.getsource(deserialize_bytes)
    assert "msgpack.loads(bin_header, raw=False, use_list=False)" in source
    assert source.index("decompress(header, frames)") < source.index("merge_and_deserialize(")
    # The header must say that frames were not split, and how they are compressed.
    header, frames = serialize_and_split(b"abc", size=1 << 62)
    assert header["compression"] == (None,)
    assert merge_and_deserialize(header, frames) == b"abc"


@pytest.mark.parametrize(
    "value",
    [VIEW, [VIEW], {"a": VIEW}, (np.arange(2), VIEW), (VIEW, np.arange(2)), [VIEW, range(3)]],
    ids=["plain", "list", "dict", "after an array", "before an array", "before an object"],
)
def test_a_memoryview_keeps_its_format_and_shape(value):
    flat = flatten(value, dumps=value_bytes.dumps, take_apart=value_bytes.take_apart)
    buffers = [buffer.copy() for buffer in flat.arrays]
    back = restore(flat.header, buffers, loads=value_bytes.loads, rebuild=value_bytes.rebuild)
    assert type(back) is type(value)
    items = list(back.values()) if isinstance(back, dict) else back
    views = [back] if isinstance(back, memoryview) else items
    (view,) = (one for one in views if isinstance(one, memoryview))
    assert (view.format, view.shape, view.tolist()) == ("d", (2, 3), VIEW.tolist())
