"""The contents of a packed device table: the type and the buffers of each column.

A shard of device columns is the buffers of its columns, one after the other, and then its
*contents*. The contents give type, rows, missing values and places of each column and its children,
in depth-first order. The format belongs to this project. The library's own format depends on the
library's version and cannot be checked. Here, every place is checked against the memory before it
becomes a pointer.

::

    offset  size
         0     4  magic "GDC\\x01": the last byte is the version
         4     4  number of columns at the top            u32
         8     4  number of columns in all                u32
        12        columns, each 44 bytes: type u8, 3 bytes of 0, scale i32, children u32, rows u32,
                  missing u32, offset u64, bytes u64 of its data, offset of its mask i64 (-1: none)

Numbers are little-endian. This module uses no device and does not read the buffers. For example, it
does not check that string offsets stay in bounds; checksums protect them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"GDC"
VERSION = 1

_HEAD = struct.Struct("<3sBII")
_COLUMN = struct.Struct("<B3siIIIQQq")

#: Bytes of a value of each type that has its values in a buffer. The order gives the numbers on the
#: wire: never change it, only append.
_ITEMSIZES: dict[str, int] = {
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
    "FLOAT32": 4, "FLOAT64": 8, "BOOL8": 1,
    "TIMESTAMP_DAYS": 4, "TIMESTAMP_SECONDS": 8, "TIMESTAMP_MILLISECONDS": 8,
    "TIMESTAMP_MICROSECONDS": 8, "TIMESTAMP_NANOSECONDS": 8,
    "DURATION_DAYS": 4, "DURATION_SECONDS": 8, "DURATION_MILLISECONDS": 8,
    "DURATION_MICROSECONDS": 8, "DURATION_NANOSECONDS": 8,
    "DECIMAL32": 4, "DECIMAL64": 8, "DECIMAL128": 16,
    "STRING": 0, "LIST": 0, "STRUCT": 0,
}  # fmt: skip
TYPES = tuple(_ITEMSIZES)
_NUMBERS = {name: number for number, name in enumerate(TYPES)}

#: Buffers start at multiples of this.
ALIGNMENT = 8
#: Device columns count rows in 31 bits.
_MOST_ROWS = (1 << 31) - 1
#: Deepest nesting of lists. Real data is flatter, and Python's recursion limit is higher.
_DEEPEST = 32


@dataclass(frozen=True)
class DeviceColumn:
    """The type of a column and the places of its buffers.

    Attributes
    ----------
    type
        One of `TYPES`.
    n_rows, n_missing
        Number of rows, and of rows without a value.
    offset, nbytes
        Place of its data. Lists and structures have none; strings have their characters there.
    mask
        Offset of the bit mask of rows with a value; None if all rows have one.
    scale
        Power of ten of decimals.
    children
        Offsets of strings; offsets and values of lists; members of structures.
    """

    type: str
    n_rows: int
    n_missing: int = 0
    offset: int = 0
    nbytes: int = 0
    mask: int | None = None
    scale: int = 0
    children: tuple[DeviceColumn, ...] = ()


def mask_nbytes(n_rows: int) -> int:
    """Return the bytes of a mask that are read: whole words of 32 bits."""
    return -(-n_rows // 32) * 4


def encode(columns: Sequence[DeviceColumn]) -> bytes:
    """Encode the contents of a table with these columns."""
    found: list[bytes] = []

    def add(column: DeviceColumn) -> None:
        found.append(
            _COLUMN.pack(
                _NUMBERS[column.type],
                b"\0\0\0",
                column.scale,
                len(column.children),
                column.n_rows,
                column.n_missing,
                column.offset,
                column.nbytes,
                -1 if column.mask is None else column.mask,
            )
        )
        for child in column.children:
            add(child)

    for column in columns:
        add(column)
    return _HEAD.pack(MAGIC, VERSION, len(columns), len(found)) + b"".join(found)


def decode(contents: bytes, n_rows: int, memory_nbytes: int) -> tuple[DeviceColumn, ...]:
    """Decode the columns of a table. All their buffers lie within the table's memory.

    Parameters
    ----------
    n_rows
        Required number of rows of each column at the top.
    memory_nbytes
        Bytes of memory for the buffers.

    Raises
    ------
    ValueError
        The contents are invalid, have another version, or contradict themselves or the memory.
    """
    if len(contents) < _HEAD.size:
        raise ValueError("the contents of a device table are cut short")
    magic, version, n_top, n_columns = _HEAD.unpack_from(contents)
    if magic != MAGIC:
        raise ValueError("not the contents of a device table")
    if version != VERSION:
        raise ValueError(
            f"the contents of a device table have version {version}, this worker reads {VERSION}: "
            "install the same dask-gpurt on every worker"
        )
    if len(contents) != _HEAD.size + n_columns * _COLUMN.size:
        raise ValueError(
            f"the contents of a device table name {n_columns} columns, but have "
            f"{len(contents)} bytes"
        )
    reading = _Reading(contents, memory_nbytes)
    columns = tuple(reading.column(n_rows) for _ in range(min(n_top, n_columns + 1)))
    if reading.n_read != n_columns:
        raise ValueError(
            f"the contents of a device table name {n_columns} columns, but describe "
            f"{reading.n_read}"
        )
    return columns


def _type_name(number: int, zeros: bytes) -> str:
    if number >= len(TYPES) or zeros != b"\0\0\0":
        raise ValueError(f"device column of unknown type {number}")
    return TYPES[number]


class _Reading:
    """A reader of contents."""

    def __init__(self, contents: bytes, memory_nbytes: int) -> None:
        self._rows = _COLUMN.iter_unpack(contents[_HEAD.size :])
        self._memory_nbytes = memory_nbytes
        self.n_read = 0

    def column(self, n_rows: int | None, depth: int = 0) -> DeviceColumn:
        """Return the next column. `n_rows` is its required number of rows, if known."""
        fields = next(self._rows, None)
        if fields is None or depth > _DEEPEST:
            raise ValueError("contents of a device table with columns missing, or too deep")
        self.n_read += 1
        number, zeros, scale, n_children, rows, n_missing, offset, nbytes, mask = fields
        name = _type_name(number, zeros)
        if rows > _MOST_ROWS or n_missing > rows or n_rows not in (None, rows):
            raise ValueError(f"device column of {rows} rows, {n_missing} of them missing")
        if scale and not name.startswith("DECIMAL"):
            raise ValueError(f"device column of type {name} with a scale")
        self._check_place(offset, nbytes)
        self._check_mask(mask, rows, n_missing)
        if nbytes < rows * _ITEMSIZES[name]:
            raise ValueError(f"{rows} values of type {name} in {nbytes} bytes")
        children = self._children(name, rows, n_children, nbytes, depth)
        place = None if mask == -1 else mask
        return DeviceColumn(name, rows, n_missing, offset, nbytes, place, scale, children)

    def _check_mask(self, mask: int, n_rows: int, n_missing: int) -> None:
        if mask != -1:
            self._check_place(mask, mask_nbytes(n_rows))
        elif n_missing:
            raise ValueError("device column with missing values and no mask")

    def _check_place(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset % ALIGNMENT or offset + nbytes > self._memory_nbytes:
            raise ValueError(
                f"{nbytes} bytes at {offset} of a device table of {self._memory_nbytes}"
            )

    def _children(
        self, name: str, n_rows: int, n_children: int, nbytes: int, depth: int
    ) -> tuple[DeviceColumn, ...]:
        wanted: tuple[int, ...] | None = (0,)
        if name == "STRING":
            wanted = (1,) if n_rows else (0, 1)
        elif name == "LIST":
            wanted = (2,)
        elif name == "STRUCT":
            wanted = None
        if wanted is not None and n_children not in wanted:
            raise ValueError(f"device column of type {name} with {n_children} children")
        if name in ("LIST", "STRUCT") and nbytes:
            raise ValueError(f"device column of type {name} with data of its own")
        members = name == "STRUCT"
        children = tuple(
            self.column(n_rows if members else None, depth + 1) for _ in range(n_children)
        )
        if name in ("STRING", "LIST") and children:
            self._check_offsets(name, children[0], n_rows)
        return children

    def _check_offsets(self, name: str, offsets: DeviceColumn, n_rows: int) -> None:
        allowed = ("INT32", "INT64") if name == "STRING" else ("INT32",)
        enough = offsets.n_rows == n_rows + 1 or offsets.n_rows == n_rows == 0
        if offsets.type not in allowed or offsets.mask is not None or not enough:
            raise ValueError(
                f"offsets of {n_rows} values of type {name}: {offsets.n_rows} of {offsets.type}"
            )
