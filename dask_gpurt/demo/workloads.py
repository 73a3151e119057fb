"""Workloads for the runner: data, Dask queries and their SQL combined.

This module selects queries by name and creates the data that they need. It opens a DuckDB
connection, which the caller's exit stack closes. :mod:`dask_gpurt.demo.runner` runs and times the
workloads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from dask_gpurt.demo import (
    flights_data,
    flights_queries,
    flights_sql,
    tpch_data,
    tpch_queries,
    tpch_sql,
)
from dask_gpurt.demo.material import Progress, connect_views, silent
from dask_gpurt.demo.runner import DemoWorkload


def choose(queries: Sequence[str] | None) -> dict[str, list[str]]:
    """Return the chosen queries by group, in the groups' own order.

    Parameters
    ----------
    queries
        "q1" to "q22" or the bare number, a name of a flights query, or "tpch" or "flights" for a
        whole group. Case does not matter. None or empty means all.

    Returns
    -------
    dict
        Keys "tpch" and "flights"; a group may be empty.

    Raises
    ------
    ValueError
        A name is unknown.
    """
    groups = {
        "tpch": [f"q{number}" for number in tpch_queries.QUERIES],
        "flights": list(flights_queries.QUERIES),
    }
    if not queries:
        return groups
    chosen: set[str] = set()
    for query in queries:
        name = query.strip().lower()
        name = f"q{name}" if name.isdigit() else name
        if name in groups:
            chosen.update(groups[name])
        elif any(name in names for names in groups.values()):
            chosen.add(name)
        else:
            known = f"q1 to q22, {', '.join(groups['flights'])}, tpch, flights"
            raise ValueError(f"there is no query {query!r}; there are {known}")
    return {group: [name for name in names if name in chosen] for group, names in groups.items()}


def tpch_workloads(
    scale: float,
    names: Sequence[str],
    cache_dir: str | os.PathLike[str] | None,
    progress: Progress = silent,
    stack: contextlib.ExitStack | None = None,
) -> list[DemoWorkload]:
    """Return TPC-H queries as workloads, creating the tables first if needed.

    Parameters
    ----------
    scale
        Scale factor.
    names
        As :func:`choose` returns them.
    cache_dir
        Directory of all data sets; None means the user's cache directory.
    progress
        Called with each step.
    stack
        Closes the DuckDB connection; None leaves that to the garbage collector.

    Returns
    -------
    list of Workload
        One per name.
    """
    directory = tpch_data.make_tpch(scale, cache_dir, progress)
    tables = tpch_data.load_tpch(directory, scale)
    connection = connect_views(directory, tpch_data.N_FILES)
    if stack is not None:
        stack.callback(connection.close)
    workloads = []
    for name in names:
        number = int(name.removeprefix("q"))
        workloads.append(
            DemoWorkload(
                name=f"Q{number}",
                title=tpch_sql.TITLES[number],
                group="TPC-H",
                run=partial(tpch_queries.QUERIES[number], tables),
                expected=_sql_answer(connection.execute, tpch_sql.tpch_sql(number, scale)),
                ordered_by=tpch_sql.ORDERED_BY[number],
            )
        )
    return workloads


def flights_workloads(
    names: Sequence[str],
    cache_dir: str | os.PathLike[str] | None,
    progress: Progress = silent,
    stack: contextlib.ExitStack | None = None,
) -> list[DemoWorkload]:
    """Return flights queries as workloads, creating the tables first if needed.

    Parameters
    ----------
    names
        As :func:`choose` returns them.
    cache_dir, progress, stack
        As for :func:`tpch_workloads`.

    Returns
    -------
    list of Workload
        One per name.
    """
    directory = flights_data.make_flights(cache_dir, progress)
    tables = flights_data.load_flights(directory)
    connection = connect_views(directory, flights_data.N_FILES)
    if stack is not None:
        stack.callback(connection.close)
    return [
        DemoWorkload(
            name=name,
            title=flights_sql.TITLES[name],
            group="flights",
            run=partial(flights_queries.QUERIES[name], tables),
            expected=_sql_answer(connection.execute, flights_sql.flights_sql(name)),
            ordered_by=flights_sql.ORDERED_BY[name],
        )
        for name in names
    ]


def _sql_answer(execute: Callable[..., Any], text: str) -> Callable[[], pd.DataFrame]:
    """Return a function that runs one SQL text and returns its answer."""

    def answer() -> pd.DataFrame:
        frame: pd.DataFrame = execute(text).df()
        return frame

    return answer
