"""What lies where in the memory of a packed device table: plain, versioned, and checked.

A shard of device columns is the buffers of its columns, one after the other, and then a *contents*:
type, rows, missing values and places of each column and of what it is made of, in the order of a
walk from the top. It is ours and not the library's own description, which is whatever the
library's version makes of it and is taken at its word: every place here is checked against the
memory that is there before a pointer is made of it.

::

    offset  size
         0     4  magic "GDC\\x01": the last byte is the version
         4     4  number of columns at the top            u32
         8     4  number of columns in all                u32
        12        columns, each 44 bytes: type u8, 3 bytes of 0, scale i32, children u32, rows u32,
                  missing u32, offset u64, bytes u64 of its data, offset of its mask i64 (-1: none)

Little-endian. Bytes in, values out: nothing here knows a device. What is in the buffers is not
looked at: that offsets of strings do not lead out of them is for checksums to say.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = b"GDC"
VERSION = 1

_HEAD = struct.Struct("<3sBII")
_COLUMN = struct.Struct("<B3siIIIQQq")

#: Bytes of one value of each type that has them in a buffer of its own. The order is that of the
#: numbers on the wire: never change it, only add to its end.
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

#: Buffers begin on such a boundary.
ALIGNMENT = 8
#: Rows of a device column are counted in 31 bits.
_MOST_ROWS = (1 << 31) - 1
#: Lists of lists of lists ...: more than anybody has, and less than recursion can take.
_DEEPEST = 32


@dataclass(frozen=True)
class DeviceColumn:
    """One column: what it is and where its buffers lie.

    Attributes
    ----------
    type
        One of `TYPES`.
    n_rows, n_missing
        Rows, and how many of them have no value.
    offset, nbytes
        Where its data lies; none for lists and structures, the characters for strings.
    mask
        Where the bits lie that say which rows have a value; None if all have one.
    scale
        Of decimals: the power of ten.
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
    """Bytes that are read of a mask: whole words of 32 bits."""
    return -(-n_rows // 32) * 4


def encode(columns: Sequence[DeviceColumn]) -> bytes:
    """Contents of a table with these columns."""
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
    """Columns of a table, every one of whose buffers lies within its memory.

    Parameters
    ----------
    n_rows
        Rows that each column at the top must have.
    memory_nbytes
        Bytes that the buffers may lie in.

    Raises
    ------
    ValueError
        These are no contents, those of another version, or they contradict themselves or the
        memory.
    """
    if len(contents) < _HEAD.size:
        raise ValueError("contents of a device table cut short")
    magic, version, n_top, n_columns = _HEAD.unpack_from(contents)
    if magic != MAGIC:
        raise ValueError("not the contents of a device table")
    if version != VERSION:
        raise ValueError(
            f"contents of a device table of version {version}, this worker reads {VERSION}: "
            "install the same dask-gpurt on every worker"
        )
    if len(contents) != _HEAD.size + n_columns * _COLUMN.size:
        raise ValueError(f"contents of {n_columns} device columns in {len(contents)} bytes")
    reading = _Reading(contents, memory_nbytes)
    columns = tuple(reading.column(n_rows) for _ in range(min(n_top, n_columns + 1)))
    if reading.n_read != n_columns:
        raise ValueError(f"{n_columns} device columns announced, {reading.n_read} described")
    return columns


def _type_name(number: int, zeros: bytes) -> str:
    if number >= len(TYPES) or zeros != b"\0\0\0":
        raise ValueError(f"device column of unknown type {number}")
    return TYPES[number]


class _Reading:
    """A walk through contents."""

    def __init__(self, contents: bytes, memory_nbytes: int) -> None:
        self._rows = _COLUMN.iter_unpack(contents[_HEAD.size :])
        self._memory_nbytes = memory_nbytes
        self.n_read = 0

    def column(self, n_rows: int | None, depth: int = 0) -> DeviceColumn:
        """The next column; `n_rows` is what it must have, if that is known."""
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
