"""`dask gpurt convert` writes one trace of exports and traces, or says why it does not."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.tracing.events import LaneWork, Trace, TraceProcess
from dask_gpurt.tracing.files import read, write
from dask_gpurt.tracing.nsight import nsys
from tests.tracing.nsight.exports import BEGAN_NS, PID, ROWS, write_export


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_export(tmp_path / "a.sqlite")
    later = [{**ROWS["TARGET_INFO_SESSION_START_TIME"][0], "utcEpochNs": BEGAN_NS + 3 * 10**9}]
    write_export(tmp_path / "b.sqlite", rows={**ROWS, "TARGET_INFO_SESSION_START_TIME": later})
    ours = Trace(
        [TraceProcess("tcp://1", "w0", "node1")],
        [LaneWork(0, "compute", "join", 1, 0.25, 0.5)],
        began_utc_s=BEGAN_NS / 1e9 - 1,
        wall_s=2.0,
        about={"pids": {"tcp://1": PID}},
    )
    write(ours, tmp_path / "ours.json")
    return tmp_path


def run(*args):
    return CliRunner().invoke(gpurt, ["convert", *args])


@pytest.mark.parametrize("out", ["a.json.gz", "a.perfetto-trace"])
def test_an_export_becomes_a_trace(out):
    if out.endswith("perfetto-trace"):
        pytest.importorskip("perfetto")
    outcome = run("a.sqlite", "-o", out)
    assert (outcome.exit_code, outcome.stdout) == (0, f"{out}: 3 processes, 17 events, 0.0 s\n")
    assert sum(work.nbytes for work in read(out).work) == sum(
        row["bytes"] for table in ROWS.values() for row in table if "bytes" in row
    )


def test_several_exports_become_one_trace():
    outcome = run("b.sqlite", "a.sqlite", "-o", "both.json")
    assert outcome.stdout == "both.json: 6 processes, 34 events, 3.0 s\n"
    trace = read("both.json")
    assert trace.began_utc_s == BEGAN_NS / 1e9
    packs = [work.start_s for work in trace.work if work.path == "pack"]
    assert packs == pytest.approx([20e-9, 3 + 20e-9], abs=1e-6)


def test_an_export_joins_our_trace():
    outcome = run("a.sqlite", "--join", "ours.json", "-o", "joined.json")
    assert outcome.stdout == "joined.json: 2 processes, 18 events, 2.0 s\n"
    trace = read("joined.json")
    assert {"join", "pack", "memset"} <= {w.path for w in trace.work if w.process == 0}


def test_a_trace_changes_its_format():
    outcome = run("ours.json", "-o", "ours.json.gz")
    assert outcome.exit_code == 0
    assert read("ours.json.gz") == read("ours.json")


def test_events_that_are_only_in_sums_are_counted(monkeypatch):
    monkeypatch.setattr(nsys, "MAX_KERNELS", 1)
    assert run("a.sqlite", "-o", "a.json").stdout.endswith(", 3 events are only in sums\n")


@pytest.mark.parametrize(
    "args, why",
    [
        (("gone.sqlite", "-o", "x.json"), "cannot read gone.sqlite: there is no such file"),
        (("a.nsys-rep", "-o", "x.json"), "nsys export --type sqlite --output a.sqlite a.nsys-rep"),
        (("a.sqlite", "-o", "x.csv"), "x.csv names no format of traces"),
        (("a.sqlite", "-o", "gone/x.json"), "cannot write gone/x.json"),
        (("a.sqlite", "ours.json", "-o", "x.json"), "ours.json is a trace of a cluster; only"),
        (("b.sqlite", "--join", "ours.json", "-o", "x.json"), "no time in common"),
        (("a.sqlite", "--join", "gone.json", "-o", "x.json"), "cannot read gone.json"),
    ],
)
def test_what_cannot_be_done_is_said(folder, args, why):
    outcome = run(*args)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("dask gpurt convert: ") and why in outcome.stderr
    assert not list(folder.glob("x.*"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    outcome = run("a.sqlite", "-o", "a.pftrace")
    assert outcome.exit_code == 2
    assert "pip install perfetto" in outcome.stderr
