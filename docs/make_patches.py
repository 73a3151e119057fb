"""Writes docs/patches.md from the tables in the modules of `dask_gpurt/plugins/patches/`.

    python docs/make_patches.py            rewrites the page
    python docs/make_patches.py --check    exits with 1 if the page is not up to date

Reads the module docstrings without importing the modules; needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = ROOT / "dask_gpurt" / "plugins" / "patches"
PAGE = ROOT / "docs" / "patches.md"

COLUMNS = ("what", "why", "taken back by")
HEADER = f"| {' | '.join(COLUMNS)} |"
RULE = "|---" * len(COLUMNS) + "|"

BEFORE = """\
# Private names of Dask and distributed

<!-- Written by docs/make_patches.py from the docstrings of the modules. Do not edit. -->

The runtime replaces or reads the names below, which Dask and distributed may change in any release.
Only the modules of `dask_gpurt/plugins/patches/` use them. The last column names the function that
restores Dask's own; it is empty where nothing is replaced. The contract tests in
`tests/plugins/patches/` fail when a release changes one of these names.

"""


def rows(docstring: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the tables in a docstring, which may wrap at any space.

    Raises
    ------
    ValueError
        A table does not have the columns of `COLUMNS`.
    """
    lines = iter(docstring.splitlines())
    for line in lines:
        if not line.startswith("|"):
            continue
        if line != HEADER or next(lines, "") != RULE:
            raise ValueError(f"a table that does not begin with {HEADER!r} and {RULE!r}: {line!r}")
        text = ""
        for part in lines:
            if not part.strip():
                break
            text += f" {part}"
            if text.endswith("|") and text.count("|") > len(COLUMNS):
                cells = tuple(cell.strip() for cell in text.split("|")[1:-1])
                if len(cells) != len(COLUMNS):
                    raise ValueError(f"a row of {len(cells)} cells: {text}")
                yield cells
                text = ""
        if text:
            raise ValueError(f"a row that does not end: {text}")


def section(path: pathlib.Path) -> str:
    """Return the section of a module: its first sentence, and its table.

    Raises
    ------
    ValueError
        The module has no table, or a malformed one.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    summary = " ".join(docstring.partition("\n\n")[0].split())
    try:
        table = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in rows(docstring)]
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    if not table:
        raise ValueError(f"{path.name}: no table of private names")
    name = f"`{path.relative_to(ROOT)}`"
    return "\n".join([f"## {path.stem}", "", f"{name}: {summary}", "", HEADER, RULE, *table, ""])


def page() -> str:
    """Return the whole page."""
    paths = [path for path in sorted(MODULES.rglob("*.py")) if path.name != "__init__.py"]
    return BEFORE + "\n".join(map(section, paths))


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description="Write docs/patches.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(arguments)
    wanted = page()
    if not options.check:
        PAGE.write_text(wanted)
        return 0
    if PAGE.exists() and PAGE.read_text() == wanted:
        return 0
    print("docs/patches.md is stale: run python docs/make_patches.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
