"""Removes the GPU code of other architectures from a shared library, without moving a byte.

A library has its GPU code in an ELF section, as containers of entries: a container is a header
and its entries, and an entry is a header and its code for one architecture. The code that no
longer counts becomes zeros, which take no room in a compressed archive. All headers stay, so the
loader of CUDA finds the rest where it was.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of code
_ARCHITECTURE_OFFSET = 0x1C
_MACHINE_CODE = 2
_SECTION = b".nv_fatbin"


class FatBinaryError(ValueError):
    """A file whose GPU code cannot be pruned."""


@dataclass(frozen=True)
class Pruned:
    """Sizes of the GPU code that stayed and of the code that became zeros."""

    kept_nbytes: int
    zeroed_nbytes: int


@dataclass(frozen=True)
class _Code:
    is_machine_code: bool
    architecture: int
    start: int
    nbytes: int


def prune(path: Path, architecture: int) -> Pruned:
    """Zero the GPU code of other architectures in a shared library, in place.

    A container without machine code for the architecture stays whole.

    Parameters
    ----------
    architecture
        The compute capability without its dot, such as 90.

    Raises
    ------
    FatBinaryError
        The file has no GPU code, none for this architecture, or is damaged.
    """
    kept_nbytes = zeroed_nbytes = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        # Read everything before the first write: an error leaves the file as it was.
        try:
            containers = list(_containers(data))
        except FatBinaryError as error:
            raise FatBinaryError(f"{path}: {error}") from error
        found = {code.architecture for one in containers for code in one if code.is_machine_code}
        if architecture not in found:
            has = ", ".join(f"{one}" for one in sorted(found)) or "none"
            raise FatBinaryError(
                f"{path} has no GPU code for architecture {architecture}; it has: {has}"
            )
        for codes in containers:
            kept = [one for one in codes if _is_for(one, architecture)] or codes
            for code in codes:
                if code in kept:
                    kept_nbytes += code.nbytes
                else:
                    data[code.start : code.start + code.nbytes] = bytes(code.nbytes)
                    zeroed_nbytes += code.nbytes
    return Pruned(kept_nbytes, zeroed_nbytes)


def _is_for(code: _Code, architecture: int) -> bool:
    return code.is_machine_code and code.architecture == architecture


def _containers(data: mmap.mmap) -> Iterator[list[_Code]]:
    """All code in the file, by container."""
    n_found = 0
    try:
        for start, end in _sections(data):
            position = data.find(_MAGIC, start, end)
            while position >= 0:
                n_found += 1
                _, _, header_nbytes, nbytes = _CONTAINER.unpack_from(data, position)
                first, position = position + header_nbytes, position + header_nbytes + nbytes
                if position > end:
                    raise FatBinaryError("damaged: a container of GPU code exceeds its section")
                yield list(_entries(data, first, position))
                position = data.find(_MAGIC, position, end)
    except struct.error as error:
        raise FatBinaryError(f"damaged: {error}") from error
    if not n_found:
        raise FatBinaryError(f"no GPU code: the section {_SECTION.decode()} is missing or empty")


def _entries(data: mmap.mmap, start: int, end: int) -> Iterator[_Code]:
    while start < end:
        kind, _, header_nbytes, nbytes = _ENTRY.unpack_from(data, start)
        (architecture,) = struct.unpack_from("<I", data, start + _ARCHITECTURE_OFFSET)
        code = start + header_nbytes
        if header_nbytes <= _ARCHITECTURE_OFFSET or code + nbytes > end:
            raise FatBinaryError("damaged: an entry of GPU code exceeds its container")
        yield _Code(kind == _MACHINE_CODE, architecture, code, nbytes)
        start = code + nbytes


def _sections(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Start and end of each section that has GPU code, in a 64-bit ELF file."""
    if data[:5] != b"\x7fELF\x02":
        raise FatBinaryError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    header_nbytes, n_sections, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + number * header_nbytes)
        for number in range(n_sections)
    ]
    for name, _, _, _, start, nbytes in headers:
        first = headers[names][4] + name
        if data[first : data.find(b"\0", first)] == _SECTION:
            yield start, start + nbytes
