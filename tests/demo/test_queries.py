"""Every demo query gives DuckDB's answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dask_gpurt.demo import (
    flights_data,
    flights_queries,
    flights_sql,
    tpch_data,
    tpch_queries,
    tpch_sql,
)
from dask_gpurt.demo.answers import first_difference
from dask_gpurt.demo.material import connect_views
from dask_gpurt.demo.tpch_data import TpchTables


@pytest.fixture(scope="module")
def tpch_sql_connection(tpch_directory: Path) -> Iterator[Any]:
    with connect_views(tpch_directory, tpch_data.N_FILES) as connection:
        yield connection


@pytest.fixture(scope="module")
def flights_sql_connection(flights_directory: Path) -> Iterator[Any]:
    with connect_views(flights_directory, flights_data.N_FILES) as connection:
        yield connection


@pytest.fixture(scope="module")
def tpch_tables(tpch_directory: Path, scale: float) -> TpchTables:
    return tpch_data.load_tpch(tpch_directory, scale)


@pytest.mark.share(4)
@pytest.mark.parametrize("number", sorted(tpch_queries.QUERIES))
def test_tpch_query_gives_the_answer_of_sql(
    number: int,
    scale: float,
    client: Client,
    tpch_tables: TpchTables,
    tpch_sql_connection: Any,
) -> None:
    expected = tpch_sql_connection.execute(tpch_sql.tpch_sql(number, scale)).df()
    with client.as_current():
        got = tpch_queries.QUERIES[number](tpch_tables)
    # An empty answer would equal the answers of many wrong queries.
    assert len(expected) > 0
    assert first_difference(got, expected, tpch_sql.ORDERED_BY[number]) is None


@pytest.mark.parametrize("name", sorted(flights_queries.QUERIES))
def test_flights_query_gives_the_answer_of_sql(
    name: str, client: Client, flights_directory: Path, flights_sql_connection: Any
) -> None:
    expected = flights_sql_connection.execute(flights_sql.flights_sql(name)).df()
    with client.as_current():
        got = flights_queries.QUERIES[name](flights_data.load_flights(flights_directory))
    assert len(expected) > 0
    assert first_difference(got, expected, flights_sql.ORDERED_BY[name]) is None


def test_every_query_has_a_title_and_an_order() -> None:
    assert set(tpch_queries.QUERIES) == set(range(1, 23))
    assert set(tpch_sql.TITLES) == set(tpch_sql.ORDERED_BY) == set(tpch_queries.QUERIES)
    assert set(flights_sql.TITLES) == set(flights_sql.ORDERED_BY) == set(flights_queries.QUERIES)


def test_threshold_of_query_11_follows_the_scale() -> None:
    assert "0.0001 " in tpch_sql.tpch_sql(11, 1.0).replace("\n", " ")
    assert "0.01" in tpch_sql.tpch_sql(11, 0.01)
