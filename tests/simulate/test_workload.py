"""Workloads survive the round trip through a trace, and invalid traces are refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dask_gpurt.errors import WorkloadError
from dask_gpurt.simulate.workload import StableStr, Workload
from tests.simulate.flat import task, workload

PAIR = workload(task("('load-1', 0)", s=0.1, nbytes=7, source=True), task("('sum-1', 0)", 0))


def test_a_trace_replays_exactly():
    back = Workload.from_json(PAIR.to_json())
    assert back == PAIR
    assert back.to_json() == PAIR.to_json()
    assert {type(one.key) for one in back.tasks} == {StableStr}


def test_trace_format_is_stable():
    assert json.loads(PAIR.to_json()) == {
        "format": "gpurt-trace",
        "version": 1,
        "name": "test",
        "columns": ["key", "dependencies", "duration_s", "nbytes", "produces_data"],
        "tasks": [
            ["('load-1', 0)", [], 0.1, 7, True],
            ["('sum-1', 0)", [0], 1.0, 0, False],
        ],
        "wanted": [1],
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "other"}, "not a trace"),
        ({"version": 2}, "version 2"),
        ({"columns": ["key"]}, "columns"),
        ({"tasks": [["x", [], 1.0]]}, "damaged"),
        ({"tasks": [["x", [5], 1.0, 0, False]], "wanted": [0]}, "does not exist"),
        ({"tasks": [["x", [0.0], 1.0, 0, False]], "wanted": [0]}, "whole numbers"),
        ({"tasks": [["x", [], -1.0, 0, False]], "wanted": [0]}, "negative"),
        ({"tasks": [["x", [], float("nan"), 0, False]], "wanted": [0]}, "finite"),
        ({"tasks": [["x", [], 1.0, float("inf"), False]], "wanted": [0]}, "damaged"),
        ({"tasks": [["x", [], "soon", 0, False]], "wanted": [0]}, "damaged"),
        ({"tasks": [["x", [], 1.0, 0, False]] * 2, "wanted": [0]}, "same key"),
        (
            {"tasks": [["x", [1], 1.0, 0, False], ["y", [0], 1.0, 0, False]], "wanted": [0]},
            "cycle",
        ),
        ({"wanted": []}, "no task is wanted"),
        ({"wanted": [2]}, "wanted task does not exist"),
        ({"wanted": None}, "damaged"),
    ],
)
def test_invalid_trace_is_refused(change, reason):
    trace = {**json.loads(PAIR.to_json()), **change}
    with pytest.raises(WorkloadError, match=reason):
        Workload.from_json(json.dumps(trace))


@pytest.mark.parametrize("text", ["", "[]", "null", "{"])
def test_trace_that_is_not_an_object_is_refused(text):
    with pytest.raises(WorkloadError):
        Workload.from_json(text)


def test_deeply_nested_trace_is_refused():
    """This includes a trace that can be parsed but not printed, since printing needs more stack."""
    for depth in [*range(800, sys.getrecursionlimit()), 100_000]:
        text = json.dumps({"format": "gpurt-trace", "version": 0})
        with pytest.raises(WorkloadError):
            Workload.from_json(text.replace("0", "[" * depth + "]" * depth))


def test_stable_text_equals_plain_text_with_a_fixed_hash():
    assert StableStr("x") == "x"
    program = "from dask_gpurt.simulate.workload import StableStr; print(hash(StableStr('a key')))"
    for seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert int(printed) == hash(StableStr("a key"))
