"""Storage of the demo's data sets, each created exactly once.

A data set is a directory of parquet files, named after its content and the version of its layout.
It is built beside its final place and renamed into it, so a reader sees the whole data set or none.
:mod:`dask_gpurt.demo.tpch_data` and :mod:`dask_gpurt.demo.flights_data` decide the content; this
module never reads it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import duckdb

#: Called with a short sentence at each step of a build.
Progress = Callable[[str], None]

INSTALL_HINT = "pip install 'dask-gpurt[demo]'"


class MissingDemoPackage(RuntimeError):
    """A package that only the demo needs is not installed.

    Parameters
    ----------
    package
        Name of the package for pip.
    """

    def __init__(self, package: str) -> None:
        super().__init__(f"the demo needs {package}, which is not installed: {INSTALL_HINT}")
        self.package = package


def silent(_step: str) -> None:
    """Ignore a progress sentence. The default."""


def default_cache_dir() -> Path:
    """Return the default directory of the demo's data sets.

    Returns
    -------
    Path
        ``$XDG_CACHE_HOME/dask-gpurt``, or ``~/.cache/dask-gpurt``. It may not exist yet.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification requires that a relative path is ignored here.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "dask-gpurt"


def build_once(
    cache_dir: str | os.PathLike[str] | None, name: str, build: Callable[[Path], None]
) -> Path:
    """Return the data set called ``name``, building it first if needed.

    Parameters
    ----------
    cache_dir
        Directory of all data sets; None means :func:`default_cache_dir`.
    name
        Directory name of the data set. It must include everything that determines the content.
    build
        Fills the empty directory that it is given. If it raises, even a ``KeyboardInterrupt``, the
        error is passed on, and no data set is left behind.

    Returns
    -------
    Path
        The complete data set.
    """
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    final = root / name
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    # In the same directory as the final place: a rename is atomic only within one file system.
    partial = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=root))
    try:
        build(partial)
        # mkdtemp makes directories private; a cache may be shared between users.
        partial.chmod(0o755)
        try:
            partial.rename(final)
        except OSError:
            # Another process finished the same data set first. Its files have the same bytes.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def write_parts(table: pa.Table, directory: Path, n_files: int) -> None:
    """Write ``table`` as ``n_files`` parquet files of nearly equal length.

    Parameters
    ----------
    table
        Rows to write, in order.
    directory
        Created if missing. Sorting the files by name keeps the order of the rows.
    n_files
        Number of files. Each becomes one partition of a Dask DataFrame.
    """
    directory.mkdir(parents=True, exist_ok=True)
    bounds = [table.num_rows * i // n_files for i in range(n_files + 1)]
    for i, (start, stop) in enumerate(pairwise(bounds)):
        pq.write_table(table.slice(start, stop - start), directory / part_name(i))


def part_name(index: int) -> str:
    """Return the file name of a part of a table. Names sort like positions, from 0."""
    return f"part-{index:04d}.parquet"


def connect_views(directory: Path, tables: Mapping[str, int]) -> duckdb.DuckDBPyConnection:
    """Open DuckDB in memory with one view per table of a data set.

    Parameters
    ----------
    directory
        A data set with one directory of parquet files per table.
    tables
        Names of the tables.

    Returns
    -------
    duckdb.DuckDBPyConnection
        Reads the same files as Dask. The caller closes it.

    Raises
    ------
    MissingDemoPackage
        DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise MissingDemoPackage("duckdb") from error
    connection = duckdb.connect(":memory:")
    connection.execute("SET enable_progress_bar = false")
    for table in tables:
        pattern = str(directory / table / "*.parquet").replace("'", "''")
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{pattern}')")
    return connection
