"""Runs the sections of the GPU benchmark and writes their rows to a JSON file.

Each section has a process of its own. A kernel that fails ends all GPU work of its process, and a
broken library may end the process. Other sections still run, and rows reported earlier are kept.
The file that `--json` names is complete after each section.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.report import Row, parse_row

#: The time limit of each section, in seconds. Together they take less than ten minutes.
SECTIONS = {
    "facts": 30.0,
    "copies": 40.0,
    "pipeline": 40.0,
    "tiers": 60.0,
    "shaping": 50.0,
    "messages": 40.0,
    "shards": 40.0,
    "exchange": 150.0,
    "codecs": 30.0,
    "overcommit": 70.0,
}


def run_section(name: str, limit_s: float) -> list[Row]:
    """Run a section in a new process and return its rows.

    If the process fails, the last row gives the reason.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=limit_s)
        problem = "" if process.returncode == 0 else f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        problem = f"took longer than {limit_s:g} s"
    rows = [row for line in out.splitlines() if (row := parse_row(line)) is not None]
    if problem:
        last_line = errors.strip().splitlines()[-1:]
        rows.append(
            Row(name, skipped=": ".join([problem, *last_line]), details={"stderr": errors[-4000:]})
        )
    return rows


def run_here(name: str) -> None:
    """Run a section in this process and print its rows, one a line."""

    def report(row: Row) -> None:
        print(row.to_json(), flush=True)

    section = importlib.import_module(f"benchmarks.gpu.{name}")
    reason = section.skip_reason()
    if reason:
        report(Row(name, skipped=reason))
    else:
        section.run(report)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the benchmark uses."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "processor": platform.machine()}
    for name in (
        "cupy-cuda13x",
        "cuda-bindings",
        "cuda-core",
        "numpy",
        "rmm-cu13",
        "cudf-cu13",
        "ucxx-cu13",
        "nvidia-nvcomp-cu13",
        "dask",
        "distributed",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(path: str, results: dict[str, Any]) -> None:
    """Replace the result file. A reader sees the old file or the new one, never a part."""
    with open(f"{path}.new", "w") as file:
        json.dump(results, file, indent=1)
    os.replace(f"{path}.new", path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", default="gpu.json", help="the file for results")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="sections to run")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.section:
        run_here(asked.section)
        return 0
    results: dict[str, Any] = {"versions": versions(), "sections": {}}
    write(asked.json, results)
    for name in asked.only or SECTIONS:
        print(f"--- {name}", flush=True)
        began = time.perf_counter()
        rows = run_section(name, SECTIONS[name])
        for row in rows:
            print(row.line(), flush=True)
        results["sections"][name] = {
            "took_s": round(time.perf_counter() - began, 2),
            "rows": [asdict(row) for row in rows],
        }
        write(asked.json, results)
    print(f"written to {asked.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
