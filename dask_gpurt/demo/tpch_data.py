"""The TPC-H tables: made with ``tpchgen-cli``, given plain types, kept as parquet files.

The generator writes decimals, days and string views. They are turned once into float64,
timestamps and strings, which pandas holds without Python objects, so that the demo measures
queries and not type conversions. The queries are in :mod:`dask_gpurt.demo.tpch_queries`, their
SQL in :mod:`dask_gpurt.demo.tpch_sql`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import dask.dataframe as dd
import pyarrow as pa
import pyarrow.parquet as pq

from dask_gpurt.demo.material import (
    MissingDemoPackage,
    Progress,
    build_once,
    part_name,
    silent,
)

#: Raised whenever the files of a data set would look different from those made before.
LAYOUT_VERSION = 1

#: Files per table at scale 1 and below. Dask reads neighbouring files together when a query needs
#: few columns, at most the square root of their number: four files stay at least two partitions.
N_FILES: dict[str, int] = {
    "lineitem": 12,
    "orders": 6,
    "partsupp": 4,
    "customer": 4,
    "part": 4,
    "supplier": 1,
    "nation": 1,
    "region": 1,
}

#: The benchmark fixes the size of these two; more files would only be empty ones.
_FIXED_SIZE = frozenset({"nation", "region"})


@dataclass(frozen=True)
class TpchTables:
    """The eight tables as lazy Dask DataFrames.

    Attributes
    ----------
    scale
        Scale factor of the data; query 11 has a threshold which depends on it.
    """

    scale: float
    lineitem: dd.DataFrame
    orders: dd.DataFrame
    partsupp: dd.DataFrame
    customer: dd.DataFrame
    part: dd.DataFrame
    supplier: dd.DataFrame
    nation: dd.DataFrame
    region: dd.DataFrame


def find_generator() -> str:
    """Return the path of the ``tpchgen-cli`` executable.

    Returns
    -------
    str
        The executable beside this Python, in this Python's scripts directories, or on ``PATH``,
        in this order.

    Raises
    ------
    MissingDemoPackage
        There is none.
    """
    # sys.executable may be a link out of a virtual environment, so it is not resolved. A
    # ``pip install --user`` has a scripts directory of its own.
    places = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    user_scheme = sysconfig.get_preferred_scheme("user")
    places.append(sysconfig.get_path("scripts", user_scheme))
    for place in [*places, None]:
        found = shutil.which("tpchgen-cli", path=place)
        if found:
            return found
    raise MissingDemoPackage("tpchgen-cli")


def n_files(table: str, scale: float) -> int:
    """Return in how many files ``table`` is kept at ``scale``.

    Parameters
    ----------
    table
        Name of a table.
    scale
        Scale factor.

    Returns
    -------
    int
        Grows with the scale, so that a partition keeps a size which suits one worker's memory.
    """
    if table in _FIXED_SIZE:
        return 1
    return max(N_FILES[table], round(N_FILES[table] * scale))


def plain_types(table: pa.Table) -> pa.Table:
    """Return ``table`` with float64 for decimals, timestamps for days, strings for views.

    Parameters
    ----------
    table
        Rows as the generator wrote them.

    Returns
    -------
    pyarrow.Table
        The same rows, with the schema's metadata dropped.
    """

    def plain(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_decimal(kind):
            return pa.float64()
        if pa.types.is_date(kind):
            return pa.timestamp("us")
        if pa.types.is_string_view(kind) or pa.types.is_large_string(kind):
            return pa.string()
        return kind

    return table.cast(pa.schema([(field.name, plain(field.type)) for field in table.schema]))


def make_tpch(
    scale: float,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = silent,
) -> Path:
    """Return the directory of the TPC-H tables at ``scale``, making them first if needed.

    Parameters
    ----------
    scale
        Scale factor; 1 is about six million rows in ``lineitem``.
    cache_dir
        Where data sets are kept; None means the user's cache directory.
    progress
        Told which table is being made.

    Returns
    -------
    Path
        One directory of parquet files per table.

    Raises
    ------
    MissingDemoPackage
        The data must be made and the generator is not installed.
    ValueError
        The scale is not a positive number.
    RuntimeError
        The generator failed.
    """
    if not scale > 0:
        raise ValueError(f"the scale must be a positive number, not {scale}")

    def build(directory: Path) -> None:
        progress(f"making TPC-H at scale {scale:g}")
        raw = directory / ".raw"
        _generate(scale, raw)
        for table in N_FILES:
            progress(f"converting TPC-H {table} at scale {scale:g}")
            _convert(raw / f"{table}.parquet", directory / table, n_files(table, scale))
        shutil.rmtree(raw)

    return build_once(cache_dir, f"tpch-scale{scale:g}-v{LAYOUT_VERSION}", build)


def _generate(scale: float, raw: Path) -> None:
    """Have the generator write one file per table into the directory ``raw``."""
    # All tables at once: the generator takes about a second to start, whatever it makes.
    command = [find_generator(), "parquet", f"--scale-factor={scale:g}"]
    command += [f"--output-dir={raw}", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise RuntimeError(f"tpchgen-cli failed: {message.splitlines()[-1]}")


def _convert(source: Path, target: Path, parts: int) -> None:
    """Turn one raw file into ``parts`` files of plain types and nearly equal length."""
    target.mkdir()
    # Batch by batch, so that memory holds about one part, whatever the scale.
    with pq.ParquetFile(source) as raw:
        n_rows = raw.metadata.num_rows
        batches = raw.iter_batches()
        held = plain_types(raw.schema_arrow.empty_table())
        for i in range(parts):
            wanted = n_rows * (i + 1) // parts - n_rows * i // parts
            while held.num_rows < wanted:
                batch = pa.Table.from_batches([next(batches)])
                held = pa.concat_tables([held, plain_types(batch)])
            pq.write_table(held.slice(0, wanted), target / part_name(i))
            held = held.slice(wanted)
    source.unlink()


def load_tpch(directory: Path, scale: float) -> TpchTables:
    """Return the tables under ``directory`` as Dask DataFrames.

    Parameters
    ----------
    directory
        What :func:`make_tpch` returned.
    scale
        The scale it was given.

    Returns
    -------
    TpchTables
        Nothing but the files' metadata has been read.
    """
    frames = {table: dd.read_parquet(str(directory / table)) for table in N_FILES}
    return TpchTables(scale=scale, **frames)
