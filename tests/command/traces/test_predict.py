"""`dask gpurt predict` prints a table of machines, as text and as JSON, and names mistakes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.command.traces.prediction_text import as_text
from dask_gpurt.predict.catalogue import Catalogue
from dask_gpurt.predict.prediction import Prediction, Predictions
from dask_gpurt.predict.recorded_program import recorded_program
from dask_gpurt.tracing import files
from tests.predict.traces import MIB, ran, trace

MACHINES = """
fast: {threads: 1, memory: 8 GiB, network: 10 Gb/s, usd_per_hour: 3600}
tiny: {threads: 1, memory: 8 MiB, network: 10 Gb/s}
"""


@pytest.fixture
def recorded(tmp_path):
    load = [ran(i, "load", 1.0 + i, 1.99 + i, ready_s=0.99, nbytes=64 * MIB) for i in range(8)]
    last = ran(8, "sum", 9.0, 9.9, *range(8), ready_s=8.995)
    path = tmp_path / "program.json.gz"
    files.write(trace(*load, last, hosts=("box",)), path)
    return path


@pytest.fixture
def machines(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MACHINES)
    return path


def run(*args):
    return CliRunner().invoke(gpurt, ["predict", *map(str, args)])


def test_the_check_comes_before_the_table(recorded, machines):
    outcome = run(recorded, "--machines", machines, "--on", "fast", "--on", "2xfast")
    assert outcome.exit_code == 0
    first, check, _, head, best, other, *notes = outcome.stdout.splitlines()
    assert first == "program.json.gz: 9 tasks, 0 shuffles, on 1 machine with 1 worker"
    assert check.startswith("check: measured 8.9 s, simulated on the same machines 8.9 s")
    assert head.split()[:3] == ["machines", "workers", "time"]
    assert best.split()[0] == "2xfast" and other.split()[0] == "1xfast"
    assert "USD" in best and "2x speed 0.5" in other
    said = "- Threads of other machines are taken to be as fast as the recorded ones."
    assert f"{said} Change this with --speed." in notes
    assert "- Costs are for the predicted time alone, at the prices in that file." in notes


def test_costs_say_of_which_day_their_prices_are(recorded):
    outcome = run(recorded, "--on", "m7i.2xlarge", "--speed", "1.5")
    assert "at prices of 2026-07-20." in outcome.stdout
    assert "taken to be 1.5 times as fast" in outcome.stdout


def test_more_of_the_recorded_machines_are_predicted_by_default(recorded):
    outcome = run(recorded)
    assert outcome.exit_code == 0
    for name in ("1xrecorded", "2xrecorded", "4xrecorded"):
        assert name in outcome.stdout
    assert "price unknown" in outcome.stdout


def test_json_has_all_figures(recorded, machines):
    outcome = run(recorded, "--machines", machines, "--on", "fast", "--on", "tiny", "--json")
    found = json.loads(outcome.stdout)
    assert found["measured_s"] == pytest.approx(8.912)
    fast, tiny = found["machines"]
    assert (fast["machines"], fast["fits"], fast["usd"]) == ("1xfast", True, fast["time_s"])
    assert fast["changes"][0]["name"] == "speed"
    assert not tiny["fits"] and "do not fit" in tiny["problem"]


def test_a_busy_scheduler_is_named(recorded):
    program = recorded_program(files.read(recorded), "program")
    groups = [Catalogue(program.cluster).group(name) for name in ("recorded", "8xrecorded")]
    rows = [
        Prediction(group, 1, 1, time_s=1.0, scheduler_share=share)
        for group, share in zip(groups, (0.4, 0.6), strict=True)
    ]
    text = as_text(Predictions("program", 1.0, 1.0, 0.0, 1.0, tuple(rows)), program, None)
    assert "On 8xrecorded, the scheduler needs more than half of this time" in text


def test_machines_that_are_too_small_say_so(recorded, machines):
    outcome = run(recorded, "--machines", machines, "--on", "tiny")
    assert outcome.exit_code == 0
    assert "does not fit: the inputs of one task do not fit into a worker" in outcome.stdout


def test_a_wrong_simulation_of_the_recorded_machines_is_said(tmp_path):
    # Nothing in the trace explains the minute between the two tasks.
    slow = ran(2, "sum", 60.0, 60.5, 1, ready_s=1.51)
    path = tmp_path / "odd.json.gz"
    files.write(trace(ran(1, "load", 1.0, 1.5), slow, hosts=("box",)), path)
    outcome = run(path)
    assert "off on the recorded machines. Take these times as guesses" in outcome.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on", "m7i.5xlarge"], "no machine is called 'm7i.5xlarge'"),
        (["--machines", "{folder}/absent.yaml"], "cannot read"),
        (["--machines", "{folder}/bad.yaml"], "bad.yaml: a lacks threads"),
        (["--machines", "{folder}/bytes.yaml"], "cannot read"),
        (["--speed", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(recorded, tmp_path, options, said):
    (tmp_path / "bad.yaml").write_text("a: {}")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    outcome = run(recorded, *(one.format(folder=tmp_path) for one in options))
    assert outcome.exit_code == 2
    assert said in outcome.stderr
    assert not outcome.stdout


def test_a_missing_trace_and_an_empty_one_are_named(tmp_path):
    assert "cannot read" in run(tmp_path / "absent.json.gz").stderr
    files.write(trace(), tmp_path / "empty.json.gz")
    outcome = run(tmp_path / "empty.json.gz")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "has no task" in outcome.stderr
