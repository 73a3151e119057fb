"""Helpers that make environments with other packages or another Python than the tests have.

Each is a virtual environment with an interpreter and packages of its own, made of links. So
imports, metadata of packages and the place of configuration files are real there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[2]
#: An environment that `make test` makes if it finds another Python.
OTHER = ROOT / ".venv-other" / "bin" / "python"
#: A version that no package has.
OLD = "0.0.9"

_ASK = """
import json, sys, sysconfig
print(json.dumps({
    "python": list(sys.version_info[:2]), "base": sys._base_executable, "prefix": sys.prefix,
    "packages": sysconfig.get_path("purelib"),
}))
"""


@lru_cache
def _about(python: str) -> dict:
    asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True)
    return json.loads(asked.stdout)


def minor_of(python: str) -> str:
    """Return the minor version of a Python, such as `3.11`."""
    return ".".join(map(str, _about(python)["python"]))


def second_python() -> str:
    """Return a Python of another minor version with Dask and this package; skip without one."""
    if not OTHER.exists():
        pytest.skip("no second Python: make .venv-other/installed OTHER_PYTHON=python3.12")
    if minor_of(str(OTHER)) == minor_of(sys.executable):
        pytest.skip(f"{OTHER} is the same Python as this one: set OTHER_PYTHON to another")
    return str(OTHER)


def without(directory: Path, *packages: str, python: str = sys.executable) -> str:
    """Return a copy of a Python, in an environment that lacks some packages."""
    return _environment(directory, python, dict.fromkeys(packages))


def with_versions(directory: Path, python: str = sys.executable, **versions: str) -> str:
    """Return a copy of a Python, in an environment with other versions of some packages."""
    return _environment(directory, python, versions)


def _environment(directory: Path, python: str, versions: Mapping[str, str | None]) -> str:
    about = _about(python)
    base, packages = Path(about["base"]), Path(about["packages"])
    executable = directory / "bin" / "python"
    executable.parent.mkdir(parents=True)
    executable.symlink_to(base)
    (directory / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\n"
    )
    library = directory / "lib" / "python{}.{}".format(*about["python"]) / "site-packages"
    library.mkdir(parents=True)
    for entry in packages.iterdir():
        name, _, rest = entry.name.partition("-")
        if name not in versions:
            (library / entry.name).symlink_to(entry)
        elif versions[name] is not None:
            _copy(entry, library, name, rest.removesuffix(".dist-info"), versions[name])
    if versions.get("dask_gpurt", "") is not None:
        copytree(Path(about["prefix"], "etc", "dask"), directory / "etc" / "dask")
    return str(executable)


def _copy(entry: Path, library: Path, name: str, found: str, version: str) -> None:
    """Copy a package or its metadata as another version."""
    target = library / (f"{name}-{version}.dist-info" if found else name)
    copytree(entry, target, ignore=ignore_patterns("__pycache__", "tests"))
    if found:
        metadata = target / "METADATA"
        metadata.write_text(
            metadata.read_text().replace(f"\nVersion: {found}\n", f"\nVersion: {version}\n")
        )
        return
    (metadata,) = entry.parent.glob(f"{name}-*.dist-info")
    found = metadata.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    for source in (target / "__init__.py", target / "_version.py"):
        if source.exists():
            text = source.read_text()
            for quote in "'\"":
                text = text.replace(f"{quote}{found}{quote}", f"{quote}{version}{quote}")
            source.write_text(text)
