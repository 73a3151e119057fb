"""Gates that are written for stock's run, in ours."""

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


def test_stocks_run_becomes_ours():
    assert onto_ours(DataFrameShuffleRun) is FrameRun


def test_methods_move_and_call_ours():
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


def test_a_class_further_down_is_refused():
    class Further(Gated):
        pass

    with pytest.raises(AssertionError):
        onto_ours(Further)
