"""Fixtures of tests that look for what is left behind."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def no_tracebacks_kept(caplog: pytest.LogCaptureFixture) -> None:
    """What distributed logs of an error would keep its frames, and buffers in them, alive."""
    caplog.set_level(logging.CRITICAL + 1, logger="distributed")
