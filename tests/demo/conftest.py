"""Fixtures for the demo's tests: small data sets, made once per session, and a client."""

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
    """Return the scale factor of the TPC-H tables."""
    return SCALE


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for data sets that all tests share."""
    return tmp_path_factory.mktemp("demo-cache")


@pytest.fixture(scope="session")
def tpch_directory(cache_dir: Path) -> Path:
    """Return the folder of the TPC-H tables."""
    return make_tpch(SCALE, cache_dir)


@pytest.fixture(scope="session")
def flights_directory(cache_dir: Path) -> Path:
    """Return the folder of the flights of 2013."""
    return make_flights(cache_dir)


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """A client of two workers in this process, which shuffle for real and start fast."""
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
