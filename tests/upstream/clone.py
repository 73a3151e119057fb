"""Lets a process find distributed's own tests, in a clone of it, as parts of the installed package.

Also a preload of schedulers and workers: what tests send to the processes of theirs is defined in
the tests' modules.
"""

from __future__ import annotations

import filecmp
import importlib
import os
import pathlib
from typing import Any

import distributed

#: In the environment: where the clone is.
VARIABLE = "UPSTREAM_CLONE"
#: Packages with tests in a folder of theirs; those of `distributed` itself are in its own.
_TESTED = ("distributed", "distributed.shuffle", "distributed.http.worker")


def check(clone: pathlib.Path) -> None:
    """Whether it is a clone of the version that is installed.

    Raises
    ------
    ValueError
        It is not.
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
    """Preload of a scheduler or a worker."""
    append_paths()
