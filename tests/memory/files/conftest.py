"""Fixtures with directories for the disk tier."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from dask_gpurt.memory.files import block_io


@pytest.fixture
def parent(tmp_path):
    return tmp_path / "spill"


@pytest.fixture
def has_direct(tmp_path):
    if not block_io.supports_direct(os, str(tmp_path / "probe")):
        pytest.skip("this file system has no direct I/O")


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as executor:
        yield executor
