"""`dask gpurt report` prints what a trace says, as text, as JSON and as a page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from dask_gpurt.cli import gpurt
from dask_gpurt.command.traces.report_text import MOST_ROWS, as_text
from dask_gpurt.tracing import files
from dask_gpurt.tracing.events import Trace
from dask_gpurt.tracing.report.trace_report import report_of
from tests.tracing.made_traces import MB, MadeTrace, ModelledShuffle

SLOW = ModelledShuffle(rates={("host1", "host2"): 100 * MB}, in_flight_nbytes=32 * MB)


def run(*args):
    return CliRunner().invoke(gpurt, ["report", *map(str, args)])


@pytest.fixture
def slow(tmp_path):
    path = tmp_path / "slow.json.gz"
    files.write(SLOW.trace(), path)
    return path


def test_the_verdict_is_printed_before_the_tables(slow):
    outcome = run(slow)
    assert outcome.exit_code == 0
    first, *lines = outcome.stdout.splitlines()
    assert first.startswith("of ") and "network host1 to host2" in first
    assert lines[1] == "verdict"
    assert lines[2].startswith("  slow-link (up to ")
    assert lines[3] == "    gpurt.shuffle.compression: lz4"
    titles = [line for line in lines if line and not line.startswith(" ")][-7:]
    assert [re.split(r":| \(see", title)[0] for title in titles] == [
        "critical path",
        "transfers, busiest first",
        "links of hosts, busiest first",
        "workers, busiest first",
        "tasks by prefix",
        "tasks that waited most for data, added up over tasks",
        "idle threads",
    ]


def test_a_reader_that_has_gone_is_no_error(slow):
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-m", "dask", "gpurt", "report", str(slow)]
    ended = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_the_slow_link_is_the_first_transfer(slow):
    lines = run(slow).stdout.splitlines()
    row = lines[lines.index("transfers, busiest first (see slow-link)") + 2]
    assert row.split()[:5] == ["message", "host1", "to", "host2", "tcp"]
    assert "100.0 MB/s" in row and "10 %" in row


def test_json_has_the_same_findings(slow):
    found = json.loads(run(slow, "--json").stdout)
    report = report_of(files.read(slow))
    assert found["summary"] == report.headline
    assert (
        [one["rule"] for one in found["bottlenecks"]]
        == [one.rule for one in report.bottlenecks]
        != []
    )
    assert sum(part["seconds"] for part in found["critical_path"]) == pytest.approx(found["wall_s"])
    assert found["transfers"][0]["link"] == "host1 to host2"
    assert found["transfers"][0]["rate"] == pytest.approx(100 * MB, rel=0.05)
    assert {row["prefix"] for row in found["tasks"]} == {row.prefix for row in report.tasks}


def test_a_page_is_written(slow, tmp_path):
    page = tmp_path / "report.html"
    outcome = run(slow, "--html", page)
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith(f"wrote {page}: of ")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "slow.json.gz" in text


def test_a_page_and_json_go_together(slow, tmp_path):
    page = tmp_path / "report.html"
    assert json.loads(run(slow, "--html", page, "--json").stdout)["wall_s"] > 0
    assert page.exists()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x1f\x8b damaged", b"not a trace"])
def test_a_file_that_is_no_trace_is_one_error(tmp_path, content):
    path = tmp_path / "trace.json.gz"
    if content is not None:
        path.write_bytes(content)
    outcome = run(path)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith("dask gpurt report: ")
    assert outcome.stdout == "" and "Traceback" not in outcome.stderr


def test_a_cut_file_is_one_error(slow):
    slow.write_bytes(slow.read_bytes()[:-100])
    outcome = run(slow)
    assert outcome.exit_code == 2 and "dask gpurt report: " in outcome.stderr


def test_a_page_that_cannot_be_written_is_one_error(slow, tmp_path):
    outcome = run(slow, "--html", tmp_path / "missing" / "report.html")
    assert outcome.exit_code == 2 and "missing" in outcome.stderr


def test_a_page_does_not_replace_its_trace(slow):
    content = slow.read_bytes()
    outcome = run(slow, "--html", slow)
    assert outcome.exit_code == 2 and "is the trace itself" in outcome.stderr
    assert slow.read_bytes() == content


def test_an_empty_trace_is_reported(tmp_path):
    path = tmp_path / "empty.json.gz"
    files.write(Trace([]), path)
    outcome = run(path)
    assert outcome.exit_code == 0
    assert outcome.stdout.startswith("the trace is empty")
    assert "The trace has no task." in outcome.stdout


@pytest.mark.parametrize("width", [60, 100, 160])
def test_lines_fit_the_terminal(width):
    lines = as_text(report_of(SLOW.trace()), width).splitlines()
    assert max(map(len, lines)) <= width


def test_long_and_hostile_names_are_shortened():
    made = MadeTrace(("host", 0))
    made.task("\x1b[31m" + "x" * 500, 0, 0.0, 0.0, 1.0)
    text = as_text(report_of(made.trace))
    assert "\x1b" not in text and "x" * 100 not in text and "xxx…" in text


def test_rows_beyond_the_most_are_counted():
    made = MadeTrace(*(("host", i) for i in range(40)))
    for i in range(40):
        made.task("work", i, 0.0, 0.0, 1.0)
    assert f"and {40 - MOST_ROWS} more" in as_text(report_of(made.trace))
