"""Runs one step of the kit on the machine: `python3 -m benchmarks.gpu.kit.step NAME`.

It unpacks the archives of the step, runs each test module and each section in a process of its
own, and writes its results after each of them. A call that is cut off loses the process in
progress alone. It needs the standard library only, and starts in the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit import outcomes
from benchmarks.gpu.kit.archives import (
    Archive,
    ArchiveError,
    check,
    read_manifest,
    unpack,
    write_json,
)
from benchmarks.gpu.kit.own_package import describe
from benchmarks.gpu.kit.steps import IMPORTS_S, STEPS, Step, Work

#: The name of a call that carries archives for later ones and runs nothing.
DELIVER = "deliver"
ROOT = Path(__file__).parents[3]


def deliver(kit: Path, archives: Mapping[str, Archive]) -> dict[str, Any]:
    """Check the parts that are on the machine, and list the others."""
    parts = [part for archive in archives.values() for part in archive.parts]
    here = [part for part in parts if (kit / part.file).exists()]
    for part in here:
        check(kit, part)
    return {
        "here": [part.file for part in here],
        "missing": [part.file for part in parts if part not in here],
    }


def prepare(step: Step, kit: Path, archives: Mapping[str, Archive]) -> dict[str, str]:
    """Unpack the archives of a step, and return the environment that finds them."""
    places = []
    for name in step.archives:
        if name not in archives:
            raise ArchiveError(f"the kit in {kit} has no archive {name}: make the kit again")
        places.append(kit.resolve() / "unpacked" / name)
        began = time.perf_counter()
        if unpack(kit, archives[name], places[-1]):
            print(f"unpacked {name} in {time.perf_counter() - began:.1f} s", flush=True)
    ours = kit.resolve() / "unpacked" / "dask_gpurt"
    return {
        **os.environ,
        **describe(ROOT, ours),
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ours, *places])),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


#: Prints one line a module: its version, or why it cannot be imported.
_IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        found = {"name": name, "version": str(getattr(module, "__version__", "")), "problem": ""}
    except Exception as error:
        found = {"name": name, "version": "", "problem": repr(error)}
    print(json.dumps(found), flush=True)
"""


def import_all(names: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Import modules in a process of its own, and return their versions."""
    began = time.perf_counter()
    command = [sys.executable, "-c", _IMPORT, *names]
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True
    )
    try:
        out, _ = process.communicate(timeout=IMPORTS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    modules = [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')]
    bad = [f"{one['name']}: {one['problem']}" for one in modules if one["problem"]]
    if len(modules) < len(names):
        bad.append(f"{names[len(modules)]} ended the process, or took longer than {IMPORTS_S:g} s")
    return {
        "name": "imports",
        "took_s": round(time.perf_counter() - began, 2),
        "problem": "; ".join(bad),
        "modules": modules,
    }


def run(work: Work, environment: Mapping[str, str], log: Path) -> dict[str, Any]:
    """Run a test module or a section, and return its outcomes or rows and how it ended."""
    with tempfile.TemporaryDirectory() as scratch:
        rows, tests = Path(scratch, "rows.json"), Path(scratch, "tests")
        began = time.perf_counter()
        with open(log, "a") as output:
            output.write(f"=== {work.name}\n")
            output.flush()
            process = subprocess.Popen(
                work.command(str(rows)),
                cwd=ROOT,
                env={**environment, outcomes.VARIABLE: str(tests)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout=work.limit_s)
                problem = f"ended with {code}" if code else ""
            except subprocess.TimeoutExpired:
                problem = f"took longer than {work.limit_s:g} s"
            finally:
                # Workers of a cluster that a test left behind would disturb the next process.
                _kill_group(process)
        result = {
            "name": work.name,
            "only": work.only,
            "limit_s": work.limit_s,
            "took_s": round(time.perf_counter() - began, 2),
            "problem": problem,
        }
        if work.is_test:
            return result | {"tests": outcomes.read(tests)}
        sections = json.loads(rows.read_text())["sections"] if rows.exists() else {}
        return result | {"rows": sections.get(work.name, {}).get("rows", [])}


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def summary(result: Mapping[str, Any]) -> str:
    """Return one line about the result of a test module or a section."""
    if "modules" in result:
        n_good = sum(not one["problem"] for one in result["modules"])
        text = f"{n_good} modules"
    elif "tests" in result:
        counts = Counter(test["outcome"] for test in result["tests"])
        text = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    else:
        n_skipped = sum(bool(row["skipped"]) for row in result["rows"])
        text = f"{len(result['rows']) - n_skipped} rows, {n_skipped} skipped"
    problem = f"; {result['problem']}" if result["problem"] else ""
    return f"{result['name']:20} {result['took_s']:7.1f} s  {text}{problem}"


def run_step(step: Step, kit: Path, out: Path, environment: Mapping[str, str]) -> bool:
    """Run all of a step; True if no process had a problem."""
    results: dict[str, Any] = {
        "step": step.name,
        "python": platform.python_version(),
        "is_complete": False,
        "results": [],
    }
    path = out / f"{step.name}.json"
    write_json(path, results)

    def keep(result: dict[str, Any]) -> None:
        results["results"].append(result)
        print(summary(result), flush=True)
        write_json(path, results)

    keep(import_all(step.imports, environment))
    for work in step.works:
        keep(run(work, environment, out / f"{step.name}.log"))
    results["is_complete"] = True
    write_json(path, results)
    return not any(result["problem"] for result in results["results"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.kit.step", description=__doc__)
    parser.add_argument("step", choices=[*(step.name for step in STEPS), DELIVER])
    parser.add_argument("--kit", type=Path, required=True, help="the folder of the archives")
    parser.add_argument("--out", type=Path, required=True, help="the folder for results")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        archives = read_manifest(asked.kit)
        if asked.step == DELIVER:
            found = deliver(asked.kit, archives)
            write_json(asked.out / f"{DELIVER}.json", found)
            print(f"here: {found['here']}\nmissing: {found['missing']}")
            return 0
        (step,) = (step for step in STEPS if step.name == asked.step)
        environment = prepare(step, asked.kit, archives)
    except ArchiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if run_step(step, asked.kit, asked.out, environment) else 1


if __name__ == "__main__":
    sys.exit(main())
