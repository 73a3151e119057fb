"""Archives of the kit: packs a folder into parts with checksums, and unpacks the parts again.

Both sides use this module. It needs the standard library only.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

MANIFEST = "manifest.json"


class ArchiveError(Exception):
    """A part of an archive that is missing or damaged; the message says what to do."""


@dataclass(frozen=True)
class Part:
    """A file that holds an archive, or a piece of one."""

    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """A compressed folder, in one part or more.

    Attributes
    ----------
    recipe
        Its packages and their pruning, to tell whether an archive is still the right one.
    unpacked_nbytes
        Size of the files in it.
    """

    recipe: str
    unpacked_nbytes: int
    parts: tuple[Part, ...]

    @property
    def sha256(self) -> str:
        """A checksum of the whole archive."""
        return hashlib.sha256("".join(part.sha256 for part in self.parts).encode()).hexdigest()


def pack(source: Path, target: Path, part_nbytes: int, recipe: str) -> Archive:
    """Compress a folder into `target`, or into `target.0`, `target.1`, ... if it is too large.

    Equal folders give equal archives: times and owners are left out.
    """
    unpacked_nbytes = 0

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal unpacked_nbytes
        unpacked_nbytes += member.size
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with lzma.open(target, "wb") as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(source.rglob("*")):
            if path.is_symlink() or not path.is_dir():
                tar.add(path, str(path.relative_to(source)), recursive=False, filter=plain)
    return Archive(recipe, unpacked_nbytes, tuple(split(target, part_nbytes)))


def split(path: Path, part_nbytes: int) -> list[Part]:
    """Cut a file into parts of at most `part_nbytes`. A file that is small enough stays."""
    for old in path.parent.glob(f"{path.name}.*"):
        old.unlink()
    if path.stat().st_size <= part_nbytes:
        return [_described(path)]
    parts: list[Part] = []
    with open(path, "rb") as file:
        while data := file.read(part_nbytes):
            part = path.with_name(f"{path.name}.{len(parts)}")
            part.write_bytes(data)
            parts.append(_described(part))
    path.unlink()
    return parts


def _described(path: Path) -> Part:
    with open(path, "rb") as file:
        return Part(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def check(folder: Path, part: Part) -> None:
    """Raise `ArchiveError` unless the part is in the folder and undamaged."""
    path = folder / part.file
    if not path.exists():
        raise ArchiveError(
            f"{path} is missing. A machine that was started anew has no files of earlier calls:"
            " carry this file again, or begin with the first call of the plan."
        )
    found = _described(path)
    if found != part:
        raise ArchiveError(
            f"{path} is damaged: it has {found.nbytes} bytes and the checksum"
            f" {found.sha256[:12]}, not {part.nbytes} and {part.sha256[:12]}. Carry it again."
        )


def unpack(folder: Path, archive: Archive, target: Path) -> bool:
    """Check, join and unpack an archive into a new folder; False if that was done before.

    Raises
    ------
    ArchiveError
        A part is missing or damaged.
    """
    stamp = target.with_name(f"{target.name}.unpacked")
    if stamp.exists() and stamp.read_text() == archive.sha256:
        return False
    for part in archive.parts:
        check(folder, part)
    stamp.unlink(missing_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with (
        io.BufferedReader(_Joined([folder / part.file for part in archive.parts])) as joined,
        tarfile.open(fileobj=joined, mode="r|xz") as tar,
    ):
        tar.extractall(target, filter="data")
    # Written last: a call that was cut off unpacks again.
    stamp.write_text(archive.sha256)
    return True


class _Joined(io.RawIOBase):
    """Files, read one after the other as if they were one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._left = list(paths)
        self._file: BinaryIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._file is None:
                if not self._left:
                    return 0
                self._file = open(self._left.pop(0), "rb")  # noqa: SIM115
            if n_read := self._file.readinto(buffer):  # type: ignore[attr-defined]
                return int(n_read)
            self._file.close()
            self._file = None


def write_manifest(folder: Path, archives: Mapping[str, Archive]) -> None:
    """Write the list of archives beside them."""
    write_json(folder / MANIFEST, {name: asdict(one) for name, one in archives.items()})


def write_json(path: Path, value: Any) -> None:
    """Write a file whole or not at all, so that a reader never sees half of it."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value, indent=1))
    os.replace(new, path)


def read_manifest(folder: Path) -> dict[str, Archive]:
    """Return the archives that belong to the kit in a folder.

    Raises
    ------
    ArchiveError
        The folder has no list of archives, or it cannot be read.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        return {
            name: Archive(
                one["recipe"],
                one["unpacked_nbytes"],
                tuple(Part(**part) for part in one["parts"]),
            )
            for name, one in found.items()
        }
    except FileNotFoundError:
        raise ArchiveError(f"{path} is missing: carry it with every call") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArchiveError(f"{path} is damaged: {error!r}. Carry it again.") from error
