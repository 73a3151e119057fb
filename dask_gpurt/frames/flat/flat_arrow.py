"""Arrow arrays and tables as nodes and buffers.

The buffers of number and text arrays are used directly, trimmed to the visible slice: Arrow itself
would carry the whole parent array. Nested arrays go through an Arrow stream, which copies once.
Extension types are pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from dask_gpurt.frames.flat.flattening import Buffer, Into, LibraryNodes, Node, OutOf

_BINARY_OFFSETS: dict[int, str] = {
    pa.string().id: "<i4",
    pa.binary().id: "<i4",
    pa.large_string().id: "<i8",
    pa.large_binary().id: "<i8",
}


def is_arrow(value: Any) -> bool:
    """Return whether `arrow_node` accepts this value."""
    if isinstance(value, (pa.Table, pa.RecordBatch)):
        return not any(_is_foreign(type_) for type_ in value.schema.types)
    return isinstance(value, (pa.ChunkedArray, pa.Array)) and not _is_foreign(value.type)


def arrow_node(value: Any, into: Into) -> Node:
    # Without columns, a table or batch has its number of rows instead: pickle loses it.
    if isinstance(value, pa.Table):
        columns = [_chunks(column, into) for column in value.columns]
        described = value.schema.serialize().to_pybytes()
        return ["arrow table", described, columns or value.num_rows]
    if isinstance(value, pa.RecordBatch):
        columns = [_array_node(column, into) for column in value.columns]
        described = value.schema.serialize().to_pybytes()
        return ["arrow batch", described, columns or value.num_rows]
    if isinstance(value, pa.ChunkedArray):
        return ["arrow chunks", _type_node(value.type), _chunks(value, into)]
    return ["arrow array", _type_node(value.type), _array_node(value, into)]


def arrow_of(node: Node, out_of: OutOf) -> Any:
    kind, described, parts = node
    if kind == "arrow array":
        return _array_of(_type_of(described), parts, out_of)
    if kind == "arrow chunks":
        return _joined(_type_of(described), parts, out_of)
    schema = pa.ipc.read_schema(pa.py_buffer(described))
    of_columns = (pa.Table if kind == "arrow table" else pa.RecordBatch).from_arrays
    if isinstance(parts, int):
        rows = of_columns([pa.nulls(parts)], names=[""])
        return rows.replace_schema_metadata(schema.metadata).select([])
    make = _joined if kind == "arrow table" else _array_of
    columns = [make(field.type, p, out_of) for field, p in zip(schema, parts, strict=True)]
    return of_columns(columns, schema=schema)


def _is_foreign(type_: pa.DataType) -> bool:
    if isinstance(type_, pa.BaseExtensionType):
        return True
    if pa.types.is_dictionary(type_):
        return _is_foreign(type_.value_type)
    return any(_is_foreign(type_.field(i).type) for i in range(type_.num_fields))


def _type_node(type_: pa.DataType) -> Node:
    name = str(type_)
    try:
        if pa.type_for_alias(name) == type_:
            return name
    except ValueError:
        pass
    return pa.schema([("", type_)]).serialize().to_pybytes()


def _type_of(node: Node) -> pa.DataType:
    if isinstance(node, str):
        return pa.type_for_alias(node)
    return pa.ipc.read_schema(pa.py_buffer(node)).field(0).type


def _chunks(column: pa.ChunkedArray, into: Into) -> list[Node]:
    return [_array_node(chunk, into) for chunk in column.chunks]


def _joined(type_: pa.DataType, parts: list[Node], out_of: OutOf) -> pa.ChunkedArray:
    return pa.chunked_array([_array_of(type_, part, out_of) for part in parts], type=type_)


def _array_node(array: pa.Array, into: Into) -> Node:
    type_ = array.type
    if pa.types.is_dictionary(type_):
        return [
            "dictionary",
            _array_node(array.indices, into),
            _array_node(array.dictionary, into),
        ]
    take = _taker(type_)
    if take is None:
        return ["stream", into.add(_streamed(array))]
    # Bits are packed in bytes, so the buffers may start up to seven entries before the array.
    shift = array.offset % 8
    if not len(array):
        return ["buffers", 0, 0, []]
    numbers = [None if b is None else into.add(b) for b in take(array, array.offset - shift)]
    return ["buffers", len(array), shift, numbers]


def _array_of(type_: pa.DataType, node: Node, out_of: OutOf) -> pa.Array:
    kind = node[0]
    if kind == "dictionary":
        _, indices, dictionary = node
        return pa.DictionaryArray.from_arrays(
            _array_of(type_.index_type, indices, out_of),
            _array_of(type_.value_type, dictionary, out_of),
            ordered=type_.ordered,
            safe=False,
        )
    if kind == "stream":
        with pa.ipc.open_stream(pa.py_buffer(out_of.buffer(node[1]))) as reader:
            array = reader.read_next_batch().column(0)
        if array.type != type_:
            raise ValueError(f"an Arrow array has type {array.type} instead of {type_}")
        return array
    if kind != "buffers":
        raise ValueError(f"unknown kind of Arrow array: {kind!r}")
    _, length, shift, numbers = node
    if length < 0 or not 0 <= shift < 8:
        raise ValueError(f"an Arrow array cannot have {length} entries from number {shift}")
    if not length:
        return pa.array([], type=type_)
    buffers = [None if n is None else pa.py_buffer(out_of.buffer(n)) for n in numbers]
    array = pa.Array.from_buffers(type_, length, buffers, offset=shift)
    # Checks lengths only. Without it, Arrow would read beyond the end of a short buffer.
    array.validate()
    return array


_Take = Callable[[pa.Array, int], list[Buffer | None]]


def _taker(type_: pa.DataType) -> _Take | None:
    """Return the function that trims the buffers of this type; None for nested types."""
    if pa.types.is_null(type_):
        return lambda array, first: [None]
    if type_.id in _BINARY_OFFSETS:
        return _take_binary
    if pa.types.is_primitive(type_) or pa.types.is_decimal(type_):
        return _take_fixed
    return _take_fixed if pa.types.is_fixed_size_binary(type_) else None


def _take_fixed(array: pa.Array, first: int) -> list[Buffer | None]:
    validity, data = array.buffers()
    last = array.offset + len(array)
    return [_bits(validity, first, last, 1), _bits(data, first, last, array.type.bit_width)]


def _take_binary(array: pa.Array, first: int) -> list[Buffer | None]:
    validity, ends, data = array.buffers()
    last = array.offset + len(array)
    dtype = np.dtype(_BINARY_OFFSETS[array.type.id])
    offsets = np.frombuffer(ends, dtype, last + 1 - first, first * dtype.itemsize)
    begin, end = int(offsets[0]), int(offsets[-1])
    if begin:
        offsets = offsets - begin
    text = None if data is None else _bytes(data.slice(begin, end - begin))
    return [_bits(validity, first, last, 1), offsets.view(np.uint8), text]


def _bits(buffer: pa.Buffer | None, first: int, last: int, width: int) -> Buffer | None:
    """Return entries of `width` bits each. The bits of entry `first` start a byte."""
    if buffer is None:
        return None
    begin, end = first * width // 8, -(-last * width // 8)
    return _bytes(buffer.slice(begin, end - begin))


def _bytes(buffer: pa.Buffer) -> Buffer:
    # NumPy does not accept an empty buffer.
    return np.frombuffer(buffer, np.uint8) if buffer.size else np.empty(0, np.uint8)


def _streamed(array: pa.Array) -> Buffer:
    batch = pa.record_batch([array], names=[""])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return _bytes(sink.getvalue())


NODES = LibraryNodes(
    is_arrow,
    arrow_node,
    dict.fromkeys(("arrow array", "arrow chunks", "arrow table", "arrow batch"), arrow_of),
)
