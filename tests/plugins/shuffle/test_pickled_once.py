"""The plan of a run is pickled once, and arrives as it was made."""

from __future__ import annotations

import pickle
from typing import Any

import pandas as pd
import pytest
from distributed.protocol import deserialize_bytes, serialize_bytes

from benchmarks.thousand_reports import WANTED_PLAN_NBYTES, nbytes_of, plan_answer
from dask_gpurt import config
from dask_gpurt.plugins.patches import p2p
from dask_gpurt.plugins.shuffle import pickled_once
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.frame_run import FrameSpec, frame_kind

SETTINGS = config.read().shuffle


class Local:
    """A value of a class that only pickle by value can carry, as those of a notebook."""


Local.__module__ = "__main__"


def frame_spec(column: Any = "c") -> FrameSpec:
    meta = pd.DataFrame({"c": [1]}).iloc[:0]
    stock = p2p.DataFrameShuffleSpec(
        id=p2p.ShuffleId("x"),
        disk=True,
        npartitions=4,
        column=column,
        meta=meta,
        parts_out={0, 1, 3},
        drop_column=True,
    )
    return FrameSpec.replacing(stock, frame_kind(meta), SETTINGS, [3, 1, 1, 1], [3, 0, 1])


def array_spec() -> ArraySpec:
    stock = p2p.ArrayRechunkSpec(
        id=p2p.ShuffleId("x"), disk=True, new=((2, 2), (3,)), old=((4,), (1, 2))
    )
    return ArraySpec.replacing(stock, SETTINGS, [(1, 0), (0, 0)])


@pytest.mark.parametrize("spec", [frame_spec(), array_spec()], ids=["frames", "arrays"])
def test_a_plan_arrives_as_it_was_made(spec: Any) -> None:
    owners = dict.fromkeys(spec.output_partitions, "tcp://a")
    sent = spec.create_new_run(worker_for=owners, span_id="s").run_spec
    # A second answer is made of the first one's pickle.
    for _ in range(2):
        got = deserialize_bytes(serialize_bytes(sent))
        assert (got.run_id, got.span_id) == (sent.run_id, "s")
        assert type(got.spec) is type(spec)
        assert type(got.worker_for) is dict
        assert got.worker_for == owners
        for name in spec.__dataclass_fields__:
            expected, found = getattr(spec, name), getattr(got.spec, name)
            if name == "meta":
                pd.testing.assert_frame_equal(found, expected)
            else:
                assert found == expected, name
        # A worker may send it on.
        assert pickle.loads(pickle.dumps(got.spec)).read_order == spec.read_order


def test_a_plan_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = []

    def counting(value: Any) -> bytes:
        pickled.append(value)
        return pickle.dumps(value)

    monkeypatch.setattr(pickled_once, "dumps", counting)
    spec = frame_spec()
    runs = [spec.create_new_run(worker_for={0: "a"}, span_id=None).run_spec for _ in range(2)]
    answers = [[pickle.dumps(run) for _ in range(3)] for run in runs]
    assert [len(set(answer)) for answer in answers] == [1, 1]
    # The spec, and the owners of each run.
    assert len(pickled) == 3


def test_values_of_a_notebook_are_carried_too() -> None:
    spec = frame_spec(column=Local())
    got = deserialize_bytes(serialize_bytes(spec))
    assert type(got.column).__name__ == "Local"


def test_a_plan_of_10_000_partitions_is_small() -> None:
    assert nbytes_of(plan_answer(10_000, 1_000)()) <= WANTED_PLAN_NBYTES
