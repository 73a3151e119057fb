"""Small wheels for tests."""

from __future__ import annotations

import zipfile


def wheel(folder, name, version, files):
    """Write a wheel with these files, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        for file, content in files.items():
            packed.writestr(file, content)
    return path
