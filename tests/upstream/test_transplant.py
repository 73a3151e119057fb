"""Subclasses that tests of distributed derive from Dask's run work with our run."""

from __future__ import annotations

import asyncio

import pytest
from distributed.shuffle._shuffle import DataFrameShuffleRun

from dask_gpurt.plugins.shuffle.frame_run import FrameRun
from tests.upstream.transplant import onto_ours


class Gated(DataFrameShuffleRun):
    def __init__(self, *args, gate="shut", **kwargs):
        self.gate = gate

    def fail(self, exception):
        self.gate = "passed"
        super().fail(exception)


def test_run_of_dask_becomes_a_run_of_the_package():
    assert onto_ours(DataFrameShuffleRun) is FrameRun


def test_moved_methods_call_the_package():
    made = onto_ours(Gated)
    assert made.__mro__[:2] == (made, FrameRun)
    run = made()
    assert run.gate == "shut"
    run.closed, run._ended = False, asyncio.Event()
    error = ValueError()
    run.fail(error)
    assert run.gate == "passed"
    assert run._exception is error
    assert onto_ours(Gated) is made


def test_nested_class_is_refused():
    class Further(Gated):
        pass

    with pytest.raises(AssertionError):
        onto_ours(Further)
