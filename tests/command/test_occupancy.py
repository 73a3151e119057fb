"""`dask gpurt occupancy` prints resident blocks and plans, and refuses unknown GPUs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.devices.occupancy.architectures import GPUS, SM90
from dask_gpurt.devices.occupancy.planner import plan
from dask_gpurt.devices.occupancy.resident_blocks import Launch

KERNEL = ("--threads", "256", "--registers", "64")


def run(*args):
    return CliRunner().invoke(gpurt, ["occupancy", *args])


def test_plan_is_printed_as_text():
    outcome = run("--gpu", "H200", *KERNEL, "--leave", "2")
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines() == [
        "GPU         H200, sm_90",
        "block       256 threads of 64 registers, 0 + 0 B of shared memory",
        "would fit   8 by threads, 4 by registers, 228 by shared memory, 32 by blocks",
        "resident    4 on each multiprocessor (registers)",
        "to leave 2  76928 B dynamic, which the kernel must be allowed first",
        "then free   77568 B of shared memory",
    ]


def test_refused_plan_is_printed_with_its_reason():
    outcome = run("--gpu", "H200", *KERNEL, "--leave", "4")
    assert outcome.exit_code == 0
    assert outcome.stdout.splitlines()[-1] == (
        "to leave 4  no: no more blocks than that are resident anyway (registers)"
    )


def test_plan_is_printed_as_json():
    outcome = run(
        "--gpu", "NVIDIA H100 PCIe", *KERNEL, "--static", "1024", "--leave", "3", "--json"
    )
    found = json.loads(outcome.stdout)
    planned = plan(SM90, Launch(256, 64, 1024), 3, pending=True)
    assert found["gpu"] == "H100"
    assert found["launch"]["static_nbytes"] == 1024
    assert (found["blocks"], found["binding"]) == (4, ["registers"])
    assert found["plan"]["dynamic_nbytes"] == planned.dynamic_nbytes
    assert "refusal" not in found


def test_refused_plan_is_valid_json():
    found = json.loads(run("--gpu", "A40", *KERNEL, "--leave", "9", "--json").stdout)
    assert found["refusal"]["reason"] == "few-already"
    assert found["refusal"]["limits"] == ["registers"]
    assert "plan" not in found


def test_occupancy_is_printed_without_a_plan():
    outcome = run("--gpu", "MI250X", *KERNEL)
    assert outcome.exit_code == 0
    assert "to leave" not in outcome.stdout


def test_unknown_gpu_is_refused():
    outcome = run("--gpu", "GTX 1080", *KERNEL)
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert "'GTX 1080'" in outcome.stderr
    assert all(name in outcome.stderr for name in GPUS)


@pytest.mark.parametrize(
    "wrong", [("--leave", "0"), ("--leave", "some"), ("--static", "-1"), ("--threads", "0")]
)
def test_impossible_values_are_refused(wrong):
    assert run("--gpu", "H200", *KERNEL, *wrong).exit_code == 2
