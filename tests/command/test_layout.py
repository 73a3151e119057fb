"""Output of the commands fits terminals of any width, without broken or missing words."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

import pytest

from dask_gpurt.command import doctor, status
from dask_gpurt.command.checks.local import Finding
from dask_gpurt.command.layout import (
    aligned,
    columns_of,
    is_terminal,
    table,
    terminal_width,
    wrapped,
)
from dask_gpurt.metrics import MEANING

WIDTHS = [40, 60, 80, 120]


def test_a_process_without_streams_has_no_terminal(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal_width() is None
    assert not is_terminal(None)


def test_the_width_is_that_of_the_streams_own_terminal(monkeypatch) -> None:
    """The other streams of this process are no terminals, or have another width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 37, 0, 0))
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as stream:
        assert terminal_width(stream) == columns_of(stream) == 37
        monkeypatch.setenv("COLUMNS", "99")
        assert terminal_width(stream) == 99
    monkeypatch.setenv("COLUMNS", "wide")
    assert columns_of(io.StringIO()) == 80


def a_status() -> dict[str, Any]:
    seconds = dict.fromkeys(("partition", "held_back", "send", "receive", "unpack"), 1.5)
    link = ("tcp://127.0.0.1:40001", "tcp://127.0.0.1:40002", 12_345_678, 2.0)
    run = {"id": "0123456789abcdef", "run": 3, "rows": 123_456_789, "nbytes": 987_654_321}
    run |= {"sent_nbytes": 1, "raw_nbytes": 2, "wire_nbytes": 1, "seconds": seconds, "skew": 1.25}
    run |= {"busiest_link": link, "hot": [("7", 1_000_000)], "mean_rows": 100.0}
    counters = dict.fromkeys(MEANING, 123_456)
    lanes = {"entries": 3, "seconds": {"codec": 1.0}, "measured_s": 2.0, "efficiency": 0.5}
    paths = [{"path": "shared", "why_not": {}, "peers": 1}]
    level = {"name": "host", "used_nbytes": 5, "capacity_nbytes": 10**9, "is_blocked": False}
    memory = {"levels": [level], "io": {"disk-write-bytes": 7}, "waiting": 2, "device": None}
    worker = {"version": "0.1.0", "counters": counters, "lanes": lanes, "paths": paths}
    why = "worker tcp://127.0.0.1:40003: dask-gpurt cannot be imported there; run pip install"
    return {
        "active": True,
        "scheduler": "tcp://127.0.0.1:8786",
        "version": "0.1.0",
        "host": "a-host-with-a-name",
        "strict": False,
        "topology": None,
        "runs": {"gpurt": 3, "stock": 1},
        "totals": counters,
        "departed": {"workers": 2, "totals": counters},
        "workers": {"tcp://127.0.0.1:40001": {**worker, "memory": memory}, "tcp://b:1": None},
        "not_ready": {"tcp://b:1": why},
        "shuffles": [run],
        "fallbacks": [{"what": "shuffle of pandas", "why": why, "count": 2}],
    }


def words(text: str) -> list[str]:
    return sorted(text.split())


def fits(text: str, width: int) -> bool:
    """Return whether every line fits, except lines of a single word that is too long."""
    return all(len(line) <= width or len(line.split()) == 1 for line in text.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
def test_status(width: int) -> None:
    found = a_status()
    wide, narrow = status.as_text(found), status.as_text(found, width)
    assert fits(narrow, width), narrow
    assert set(words(narrow)) == set(words(wide))
    assert "and 2 that left" in narrow
    assert status.as_text(found, 1000) == wide


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor(width: int) -> None:
    findings = [
        Finding("ok", "python", "3.11.7 at /usr/bin/python"),
        Finding("problem", "topology", "some of many words " * 20, "a remedy of many words " * 9),
    ]
    text = doctor.as_text(findings, 1)
    assert fits(doctor.as_text(findings, 1, width), width)
    assert words(doctor.as_text(findings, 1, width)) == words(text)
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize("width", WIDTHS)
def test_placement(width: int) -> None:
    differing = {"key": "('a-long-name', 3)", "worker": "tcp://127.0.0.1:1", "stock_worker": "b"}
    differing |= {"reason": "its inputs are there " * 5}
    differing |= {"candidates": [{"worker": "tcp://127.0.0.1:1", "queue_s": 1.0, "move_s": 2.0}]}
    placed = {
        "policy": "data-aware",
        "decisions": {},
        "steals": {"allowed": 1, "refused": 2},
        "differ_from_stock": 1,
        "saved_s": 0.5,
        "failed": 3,
        "last_differing": [differing],
    }
    narrow = status.placement_as_text(placed, width)
    assert fits(narrow, width), narrow
    assert words(narrow) == words(status.placement_as_text(placed))


def test_word_wider_than_its_column_gets_its_own_line() -> None:
    assert wrapped("a " + "w" * 50 + " b", 20, "  ") == ["  a", "  " + "w" * 50, "  b"]
    assert wrapped("", 20, "  ") == ["  "]


def test_columns_without_room_are_stacked() -> None:
    assert aligned([("name", "text")], width=80) == ["name  text"]
    assert aligned([("a-long-name", "text")], width=20) == ["a-long-name", "  text"]
    assert table(["a", "b"], [["1", "2"]], 80) == ["  a  b", "  1  2"]
    assert table(["a", "b"], [["1" * 20, "2"]], 20) == ["  " + "1" * 20, "    b  2"]


def test_output_fits_a_terminal_and_a_pipe() -> None:
    """`doctor` runs as a process, with a terminal and with a pipe as output."""
    command = [sys.executable, "-m", "dask_gpurt.cli", "doctor"]
    env = {**os.environ, "COLUMNS": "50"}
    piped = subprocess.run(command, env=env, capture_output=True, text=True).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        pieces = []
        try:
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        except OSError:  # Linux reports the end of a terminal this way
            pass
        process.wait()
    os.close(ours)
    shown = b"".join(pieces).decode().replace("\r\n", "\n")
    assert words(shown) == words(piped)
    assert fits(shown, 50), shown
    assert not fits(piped, 50)
