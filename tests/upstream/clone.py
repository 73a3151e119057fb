"""A module that makes distributed's own tests, from a clone, importable as part of the package.

It is also a preload of schedulers and workers, because tests send them objects that are defined in
modules of tests.
"""

from __future__ import annotations

import filecmp
import importlib
import os
import pathlib
from typing import Any

import distributed

#: Environment variable with the path of the clone.
VARIABLE = "UPSTREAM_CLONE"
#: Packages that have a folder of tests in the clone.
_TESTED = (
    "distributed",
    "distributed.dashboard",
    "distributed.deploy",
    "distributed.diagnostics",
    "distributed.http.worker",
    "distributed.shuffle",
)


def check(clone: pathlib.Path) -> None:
    """Check that a clone has the version of distributed that is installed.

    Raises
    ------
    ValueError
        The clone has another version.
    """
    installed = pathlib.Path(distributed.__file__).parent
    sources = [path.relative_to(installed) for path in _sources(installed)]
    _, different, missing = filecmp.cmpfiles(
        installed, clone / "distributed", list(map(str, sources)), shallow=False
    )
    if different or missing:
        raise ValueError(
            f"{clone} is not a clone of distributed {distributed.__version__}: "
            f"{', '.join(different + missing)} differ"
        )


def _sources(installed: pathlib.Path) -> list[pathlib.Path]:
    """Return the sources that the selected tests test."""
    return [
        *(installed / "shuffle").glob("*.py"),
        *installed.glob("*worker*.py"),
        installed / "active_memory_manager.py",
        installed / "scheduler.py",
        installed / "stealing.py",
        installed / "spill.py",
        installed / "utils_test.py",
    ]


def append_paths() -> None:
    """Append the clone's folders to the paths of the installed packages."""
    for name in _TESTED:
        package = importlib.import_module(name)
        folder = str(pathlib.Path(os.environ[VARIABLE], *name.split(".")))
        if folder not in package.__path__:
            package.__path__.append(folder)


def dask_setup(server: Any) -> None:
    """Run as a preload of a scheduler or a worker."""
    append_paths()
