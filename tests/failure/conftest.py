"""Fixtures that several failure tests use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from tests.failure.memory_stage import open_small


@pytest.fixture
def small_client(tmp_path: Path) -> Iterator[Client]:
    """A client of a cluster whose workers hold few values in memory."""
    with open_small(tmp_path) as client:
        yield client


@pytest.fixture
def no_tracebacks_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Keep distributed from logging errors, whose records hold frames and their buffers alive."""
    caplog.set_level(logging.CRITICAL + 1, logger="distributed")
