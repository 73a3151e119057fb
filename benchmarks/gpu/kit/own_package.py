"""Describes our package as an installed one, although it runs from its source.

Dask asks for the version of an installed package, and for its entry points and its defaults. It
needs the standard library only.
"""

from __future__ import annotations

import configparser
import shutil
from pathlib import Path

import dask_gpurt

NAME = "dask-gpurt"


def describe(root: Path, folder: Path) -> dict[str, str]:
    """Write the description into a folder, and return the variables to set.

    Parameters
    ----------
    root
        The repository.
    """
    found = folder / f"{NAME.replace('-', '_')}-{dask_gpurt.__version__}.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {dask_gpurt.__version__}\n"
    )
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    groups = setup["options.entry_points"].items()
    (found / "entry_points.txt").write_text(
        "".join(f"[{group}]\n{entries.strip()}\n" for group, entries in groups)
    )
    defaults = folder / "etc"
    defaults.mkdir(exist_ok=True)
    shutil.copy(root / "dask_gpurt" / "gpurt.yaml", defaults)
    return {"DASK_ROOT_CONFIG": str(defaults)}
