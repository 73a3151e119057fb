"""Values are measured and serialized by the functions of Dask that do it for stock."""

from __future__ import annotations

import inspect

from distributed.protocol.serialize import (
    deserialize_bytes,
    merge_and_deserialize,
    serialize_and_split,
    serialize_bytelist,
)


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
