"""A plugin of pytest that writes the outcome of each test to a file as soon as it is known.

A run that hangs or is killed leaves the outcomes until then, and the name of the test in progress.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

#: Names the file, in the environment of pytest.
VARIABLE = "GPURT_KIT_OUTCOMES"
STARTED = "started"


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, STARTED)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, _reason(report), report.duration)


def pytest_collectreport(report: Any) -> None:
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, _reason(report))


def _reason(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)[-2000:]


def _write(name: str, outcome: str, reason: str = "", took_s: float = 0.0) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        found = {"name": name, "outcome": outcome, "reason": reason, "took_s": round(took_s, 3)}
        file.write(json.dumps(found) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return one outcome a test, in the order in which the tests began."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        # A test that passed can still fail as its fixtures close, and never the other way.
        if found.get(one["name"], {}).get("outcome") != "failed":
            found[one["name"]] = one
    return list(found.values())
