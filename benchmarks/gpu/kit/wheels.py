"""Downloads wheels for the machine with pip, and unpacks the files that a run needs."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.kit.packages import LEFT_OUT

PYTHON = "3.12"
#: pip compares platforms by name, so each version of glibc that a wheel may name is in the list.
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)


class DownloadError(Exception):
    """A package whose wheel cannot be had; the message names it."""


def download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Download the wheels that the folder lacks, and return one wheel a requirement.

    Parameters
    ----------
    requirements
        Names with versions, such as `toolz==1.2.0`. Their dependencies are not downloaded.

    Raises
    ------
    DownloadError
        pip does not find a wheel, or does not reach a package index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [one for one in requirements if _wheel(one, folder) is None]
    errors = _pip_download(missing, folder) if missing else ""
    still = [one for one in missing if _wheel(one, folder) is None]
    if still:
        # pip saves nothing if one wheel is missing, and its errors name that one.
        named = [one for one in still if re.search(rf"(?<![\w-]){re.escape(one)}", errors)]
        raise DownloadError(
            f"pip cannot download a wheel of {', '.join(named or still)} for Python {PYTHON} on"
            f" x86-64. Connect to a package index, or put the wheel into {folder}. pip says:"
            f" {errors.strip() or 'nothing'}"
        )
    return [wheel for one in requirements if (wheel := _wheel(one, folder)) is not None]


def _pip_download(requirements: Sequence[str], folder: Path) -> str:
    """Run pip, and return its errors."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"),
            *(option for platform in PLATFORMS for option in ("--platform", platform)),
            *("--dest", str(folder), *requirements),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "\n".join(errors) if errors or not done.returncode else done.stderr[-1000:]


def _wheel(requirement: str, folder: Path) -> Path | None:
    name, version = requirement.split("==")
    name = re.sub("[-_.]+", "_", name).lower()
    for path in sorted(folder.glob("*.whl")):
        found, found_version = path.name.split("-")[:2]
        if (found.lower(), found_version) == (name, version):
            return path
    return None


def unpack_wheels(wheels: Sequence[Path], folder: Path) -> None:
    """Unpack wheels into one folder, without the files that no run needs."""
    libraries: dict[tuple[Path, bytes], Path] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            for member in packed.infolist():
                name = re.sub(r"^[^/]*\.data/(purelib|platlib)/", "", member.filename)
                if member.is_dir() or any(fnmatch.fnmatch(name, one) for one in LEFT_OUT):
                    continue
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                data = packed.read(member)
                if ".so" in path.name:
                    # Wheels have no links, so a library is there once for each of its names.
                    key = (path.parent, hashlib.sha256(data).digest())
                    first = libraries.setdefault(key, path)
                    if first != path:
                        os.symlink(first.name, path)
                        continue
                path.write_bytes(data)
