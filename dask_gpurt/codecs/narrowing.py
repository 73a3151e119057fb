"""Numbers in fewer bytes: `value = base + step * code`, with codes of 0, 1, 2 or 4 bytes.

Most columns use a fraction of their type. Examples are keys of a few thousand customers in 64 bits,
days counted in microseconds, and prices with two decimals in a double. This module tries three
readings of the items and takes the one with the narrowest codes:

- *offset*: the items as integers, counted from the smallest in steps of their common divisor;
- *delta*: the same for the differences between neighbours (offsets, sorted keys);
- *decimal*: doubles that are a whole number times a power of ten, as that whole number.

All arithmetic wraps, so integers of any sign and byte order are restored. Integers in another byte
order than the machine's just do not get narrow. A decimal reading is used only if it restores the
doubles bit by bit. The functions are pure, and every step is one vectorized pass.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_gpurt.codecs.codec import Bytes
from dask_gpurt.errors import ProtocolError

Array = npt.NDArray[Any]

#: reading, width of a code, power of ten, base, step, first
_PARAMETERS = struct.Struct("<BBBQQQ")
PARAMETERS_NBYTES = _PARAMETERS.size

_OFFSET, _DELTA, _DECIMAL_TIMES, _DECIMAL_OVER = range(4)

#: Largest power of ten that a decimal reading tries.
_MAX_POWER = 4
_SCALES = 10.0 ** np.arange(_MAX_POWER + 1)[:, None]

#: Number of items to inspect before a whole column.
_PROBES = 64

ITEMSIZES = (2, 4, 8)


@dataclass(frozen=True)
class _Codes:
    """Codes of integers, with their base and step."""

    codes: Array
    base: int
    step: int

    @property
    def width(self) -> int:
        return self.codes.dtype.itemsize if self.codes.size else 0


def narrow(raw: Bytes, itemsize: int) -> tuple[bytes, Bytes, int] | None:
    """Encode whole items in narrower codes.

    Parameters
    ----------
    raw
        One or more whole items.
    itemsize
        One of `ITEMSIZES`.

    Returns
    -------
    (parameters, codes, width) or None
        `width` is the bytes of one code. None if no reading has codes narrower than the items.
    """
    items = raw.view(f"<u{itemsize}")
    found, reading, power = None, _OFFSET, 0
    # Start with the reading that promises narrower codes: it usually wins, and spares the other.
    for least_width, one in sorted(_promised(items)):
        below = itemsize if found is None else found.width
        if least_width >= below:
            break
        codes = _offset(np.subtract(items[1:], items[:-1]) if one == _DELTA else items, below)
        if codes is not None:
            found, reading = codes, one
    if found is None and itemsize == 8:
        decimal = _decimal(items.view("<f8"))
        if decimal is not None:
            found, reading, power = decimal
    if found is None:
        return None
    first = int(items[0]) if reading == _DELTA else 0
    mask = 2**64 - 1
    parameters = _PARAMETERS.pack(
        reading, found.width, power, found.base & mask, found.step & mask, first & mask
    )
    return parameters, found.codes.view(np.uint8), found.width


def _promised(items: Array) -> list[tuple[int, int]]:
    """Return for each integer reading the least width that its codes can have, from a few items.

    The span and the common divisor of all items are at best those of the few. So a column that
    cannot be narrowed needs no pass over all items.
    """
    every = _every(len(items))
    found = [(_least_width(items[::every]), _OFFSET)]
    if len(items) > 1:
        found.append((_least_width(items[1::every] - items[:-1:every]), _DELTA))
    return found


def _least_width(probes: Array) -> int:
    signed = probes.view(f"<i{probes.dtype.itemsize}")
    least = signed.min()
    span = int(signed.max()) - int(least)
    if span < 2**8:
        return _width(span)
    return _width(span // int(np.gcd.reduce(np.subtract(probes, least.view(probes.dtype)))))


def _every(n_items: int) -> int:
    return max(1, n_items // _PROBES)


def _offset(items: Array, below: int) -> _Codes | None:
    """Encode unsigned items, read with a sign, in codes of less than `below` bytes; else None."""
    itemsize = items.dtype.itemsize
    signed = items.view(f"<i{itemsize}")
    base = int(signed.min())
    span = int(signed.max()) - base
    if span == 0:
        return _Codes(np.empty(0, dtype=np.uint8), base, 1)
    least = items.dtype.type(base % 2 ** (8 * itemsize))
    width = _width(span)
    step = int(np.gcd.reduce(np.subtract(items[:: _every(len(items))], least)))
    if step > 1 and _width(span // step) < min(width, below):
        distances = np.subtract(items, least)
        counted = np.floor_divide(distances, items.dtype.type(step))
        if np.array_equal(np.multiply(counted, items.dtype.type(step)), distances):
            return _Codes(counted.astype(f"<u{_width(span // step)}"), base, step)
    if width >= below:
        return None
    codes = np.empty(len(items), dtype=f"<u{width}")
    np.subtract(items, least, out=codes, casting="unsafe")
    return _Codes(codes, base, 1)


def _width(span: int) -> int:
    return 0 if span == 0 else 1 if span < 2**8 else 2 if span < 2**16 else 4 if span < 2**32 else 8


def _decimal(values: Array) -> tuple[_Codes, int, int] | None:
    """Return codes, reading and power of ten for doubles that are decimal numbers."""
    with np.errstate(all="ignore"):
        for power, reading in _decimal_readings(values[:: _every(len(values))]):
            whole = _whole(values, power, reading)
            if whole is not None:
                found = _offset(whole.view("<u8"), 8)
                return None if found is None else (found, reading, power)
    return None


def _decimal_readings(probes: Array) -> list[tuple[int, int]]:
    """Return the powers of ten and readings that restore a few doubles, smallest power first."""
    # In one step: otherwise, a column that is not decimal would pay for ten failed attempts.
    wanted = np.ascontiguousarray(probes).view("<i8")
    numbers = np.rint(probes * _SCALES)
    numbers += 0.0  # turns a negative zero into a positive one
    times = (numbers * (1 / _SCALES)).view("<i8") == wanted
    over = (numbers / _SCALES).view("<i8") == wanted
    found = np.stack([times.all(axis=1), over.all(axis=1)], axis=1)
    return [(int(power), _DECIMAL_TIMES + int(divides)) for power, divides in np.argwhere(found)]


def _whole(values: Array, power: int, reading: int) -> Array | None:
    """Return the integers that give exactly these doubles in this reading, or None."""
    numbers = np.multiply(values, 10.0**power)
    np.rint(numbers, out=numbers)
    whole = numbers.astype("<i8")
    # Compare bit by bit with what the receiver computes. Negative zeros, NaNs and numbers beyond
    # 64-bit integers are not restored.
    np.copyto(numbers, whole)
    back = _scaled(numbers, power, reading)
    return whole if np.array_equal(back.view("<i8"), values.view("<i8")) else None


def _scaled(numbers: Array, power: int, reading: int) -> Array:
    """Convert whole numbers to decimals in place."""
    # Parsers of text divide; readers of scaled integers multiply. The last bit differs.
    if reading == _DECIMAL_TIMES:
        numbers *= 1 / 10.0**power
    else:
        numbers /= 10.0**power
    return numbers


def parameters_of(head: bytes, itemsize: int) -> tuple[int, ...]:
    """Decode and check parameters. The second field is the width of a code.

    Raises
    ------
    ProtocolError
        The parameters are cut short, or `narrow` cannot have written them.
    """
    if len(head) != PARAMETERS_NBYTES:
        raise ProtocolError("the parameters of narrowed numbers are cut short")
    fields = _PARAMETERS.unpack(head)
    reading, width, power, *_ = fields
    if (
        itemsize not in ITEMSIZES
        or width not in (0, 1, 2, 4)
        or width >= itemsize
        or reading > _DECIMAL_OVER
        or power > _MAX_POWER
        or (reading >= _DECIMAL_TIMES and itemsize != 8)
    ):
        raise ProtocolError("the parameters of narrowed numbers are invalid")
    return fields


def n_codes(fields: tuple[int, ...], n_items: int) -> int:
    """Return the number of codes for a number of items."""
    if fields[1] == 0:
        return 0
    return n_items - 1 if fields[0] == _DELTA else n_items


def widen_into(codes: Bytes, fields: tuple[int, ...], out: Bytes, itemsize: int) -> None:
    """Write the items of these codes. This is the inverse of `narrow`."""
    reading, width, power, base, step, first = fields
    kind = np.dtype(f"<u{itemsize}").type
    items = out.view(f"<u{itemsize}")
    wrapped = 2 ** (8 * itemsize)
    target = items
    if reading == _DELTA:
        items[0] = kind(first % wrapped)
        target = items[1:]
    if width:
        np.copyto(target, codes.view(f"<u{width}"))
        if step != 1:
            np.multiply(target, kind(step % wrapped), out=target)
        np.add(target, kind(base % wrapped), out=target)
    else:
        target[...] = kind(base % wrapped)
    if reading == _DELTA:
        np.add.accumulate(items, out=items)
    elif reading >= _DECIMAL_TIMES:
        doubles = _scaled(items.view("<i8").astype("<f8"), power, reading)
        np.copyto(items, doubles.view("<u8"))
