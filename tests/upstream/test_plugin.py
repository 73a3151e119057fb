"""The plugin for distributed's tests reports runs left to Dask, and modules without a run."""

from __future__ import annotations

import pandas as pd
import pytest
from distributed.shuffle._rechunk import ArrayRechunkSpec
from distributed.shuffle._shuffle import DataFrameShuffleSpec

from dask_gpurt import config
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.frame_run import FrameSpec, frame_kind
from tests.upstream.plugin import idle, left_to_stock

SETTINGS = config.read().shuffle
RECHUNK = ArrayRechunkSpec(id="a", disk=True, new=((4,),), old=((2, 2),))


def shuffle(meta):
    return DataFrameShuffleSpec("b", True, 2, "key", meta, {0, 1}, True)


FRAME = pd.DataFrame({"key": [1]})


class NoAdapter(pd.DataFrame):
    pass


@pytest.mark.parametrize(
    ("spec", "is_left"),
    [
        (RECHUNK, True),
        (ArraySpec.replacing(RECHUNK, SETTINGS), False),
        (shuffle(FRAME), True),
        (
            FrameSpec.replacing(shuffle(FRAME), frame_kind(FRAME), SETTINGS),
            False,
        ),
        (shuffle(NoAdapter({"key": [1]})), False),
    ],
)
def test_fallbacks_to_dask_are_recognised(spec, is_left):
    assert left_to_stock(spec) == is_left


def test_module_without_observed_calls_is_idle():
    assert idle({}) == []
    assert idle({"test_rechunk.py": {"shuffles"}, "test_merge.py": {"shuffles"}}) == [
        "test_rechunk.py"
    ]
    assert idle({"test_rechunk.py": {"rechunks"}, "test_worker.py": set()}) == []
