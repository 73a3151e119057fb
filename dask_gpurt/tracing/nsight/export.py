"""The tables of an export of Nsight Systems, whichever of them there are.

Tables appear with the first event of their kind, and columns come and go with versions. So each
table is asked for its columns, and a column that is missing gives a default.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dask_gpurt.errors import TraceFileError

#: Any export has one of these.
_SIGNS = ("META_DATA_", "EXPORT_META_DATA", "StringIds", "TARGET_INFO_", "CUPTI_", "NVTX_")
#: Reports that only Nsight Systems itself can read.
_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")


class Export:
    """An open SQLite file that `nsys export` wrote.

    Parameters
    ----------
    path
        Name of the file.

    Raises
    ------
    TraceFileError
        There is no such file, it is damaged, or it is no export.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        if self._path.name.endswith(_REPORTS):
            output = self._path.with_suffix(".sqlite")
            raise TraceFileError(
                f"{path} can only be read by Nsight Systems. Where nsys is installed, run"
                f" `nsys export --type sqlite --output {output} {path}`, and name {output} here"
            )
        if not self._path.is_file():
            raise TraceFileError(f"cannot read {path}: there is no such file")
        # Immutable: SQLite writes no files beside it, so that it may be in a folder of others.
        name = f"file:{quote(str(self._path.absolute()))}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(name, uri=True)
        # Names of processes and environments are bytes of any kind.
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        self._columns: dict[str, set[str]] = {}
        query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        try:
            self._tables = {name for (name,) in self._ask(query)}
            if not any(name.startswith(_SIGNS) for name in self._tables):
                raise TraceFileError(f"{path} is an SQLite file, and no export of Nsight Systems")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _ask(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            # No `yield from`: a generator that is dropped would close the cursor after its file.
            for row in self._connection.execute(query, values):  # noqa: UP028
                yield row
        # Names of columns are decoded as well. SQLite asks for the memory that damaged pages claim.
        except (sqlite3.Error, UnicodeDecodeError, MemoryError) as error:
            why = str(error) or "it claims more memory than there is"
            raise TraceFileError(
                f"{self._path} is damaged, or no export of Nsight Systems: {why}"
            ) from error

    def columns(self, table: str) -> set[str]:
        """Return the columns of a table; none without the table."""
        if table not in self._tables:
            return set()
        if table not in self._columns:
            self._columns[table] = {row[1] for row in self._ask(f'PRAGMA table_info("{table}")')}
        return self._columns[table]

    def rows(
        self, table: str, needed: tuple[str, ...], optional: dict[str, Any], more: str = ""
    ) -> Iterator[tuple[Any, ...]]:
        """Yield rows of a table: the needed columns, then the optional ones.

        Parameters
        ----------
        table
            Nothing is yielded if it is missing, or lacks a needed column. Nor are rows that have
            no value there.
        optional
            Columns, and what is yielded where the column or its value is missing.
        more
            What follows in the query.
        """
        known = self.columns(table)
        if not known or not known.issuperset(needed):
            return
        columns = [f'"{name}"' for name in needed]
        columns += [f'IFNULL("{name}", ?)' if name in known else "?" for name in optional]
        present = " AND ".join(f'"{name}" IS NOT NULL' for name in needed)
        query = f'SELECT {", ".join(columns)} FROM "{table}" WHERE {present} {more}'
        yield from self._ask(query, tuple(optional.values()))
