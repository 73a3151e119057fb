"""Runs the sections of the GPU benchmark, each in a process of its own, and writes JSON as it goes.

A kernel that fails ends all work of its process on the device, and a library that is missing or
broken is a matter of its section alone: so no section can lose the rows of another, nor those that
it has said itself. `--json` names the file, which is whole after each section.
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

from benchmarks.gpu.report import Row, row_of

#: Section to the most seconds that it may take. Together they stay under eight minutes.
SECTIONS = {
    "facts": 30.0,
    "copies": 60.0,
    "pipeline": 60.0,
    "tiers": 110.0,
    "shaping": 80.0,
    "exchange": 90.0,
    "codecs": 40.0,
}


def run_section(name: str, limit_s: float) -> list[Row]:
    """Rows of a section, and one more that says how it ended unless it ended well."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=limit_s)
        ended = "" if process.returncode == 0 else f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        ended = f"took longer than {limit_s:g} s"
    rows = [row for line in out.splitlines() if (row := row_of(line)) is not None]
    if ended:
        last = errors.strip().splitlines()[-1:]
        rows.append(
            Row(name, skipped=": ".join([ended, *last]), details={"stderr": errors[-4000:]})
        )
    return rows


def run_here(name: str) -> None:
    """A section, in this process: its rows go to standard output, one a line."""

    def say(row: Row) -> None:
        print(row.to_json(), flush=True)

    section = importlib.import_module(f"benchmarks.gpu.{name}")
    why_not = section.why_not()
    if why_not:
        say(Row(name, skipped=why_not))
    else:
        section.run(say)


def versions() -> dict[str, str]:
    """Of whatever is installed that has a part in this."""
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
    """All of it or nothing: whoever reads meanwhile sees the last whole file."""
    with open(f"{path}.new", "w") as file:
        json.dump(results, file, indent=1)
    os.replace(f"{path}.new", path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", default="gpu.json", help="where results go")
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
