"""Data shared by the tests of the demo: made once per session, at the smallest useful scale."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("duckdb", reason="needs the demo's packages")
pytest.importorskip("rich", reason="needs the demo's packages")

from distributed import Client, LocalCluster

from dask_gpurt.demo.flights_data import make_flights
from dask_gpurt.demo.tpch_data import make_tpch

SCALE = 0.01


@pytest.fixture(scope="session")
def scale() -> float:
    """The scale factor of the TPC-H tables."""
    return SCALE


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of data sets which outlives single tests."""
    return tmp_path_factory.mktemp("demo-cache")


@pytest.fixture(scope="session")
def tpch_directory(cache_dir: Path) -> Path:
    """The TPC-H tables."""
    return make_tpch(SCALE, cache_dir)


@pytest.fixture(scope="session")
def flights_directory(cache_dir: Path) -> Path:
    """The flights of 2013."""
    return make_flights(cache_dir)


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """Two workers in this process: enough for real shuffles, without the cost of processes."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
            silence_logs=logging.ERROR,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client
