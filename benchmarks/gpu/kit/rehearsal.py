"""Rehearses the calls of a plan on this machine, in an empty folder that stands for the other.

The folder keeps its files from call to call, as the machine does. Programs and packages come from
a new virtual environment of Python 3.12 that has the packages of `packages.MACHINE`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit.packages import MACHINE
from benchmarks.gpu.kit.plan import Call
from benchmarks.gpu.kit.step import DELIVER
from benchmarks.gpu.kit.wheels import PYTHON

#: Results of a call: at most so many files, of at most so many bytes.
RESULT_FILES, RESULT_NBYTES = 8, 16 << 20
MIB = 1 << 20


class RehearsalError(Exception):
    """A rehearsal that cannot begin."""


def find_python() -> str:
    """Return a Python of the machine's version, of the path or of pyenv.

    Raises
    ------
    RehearsalError
        There is none.
    """
    pyenv = sorted(Path.home().glob(f".pyenv/versions/*/bin/python{PYTHON}"))
    test = f"import ssl, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{PYTHON}')"
    for python in (f"python{PYTHON}", "python3", *map(str, pyenv)):
        if path := shutil.which(python):
            if not subprocess.run([path, "-c", test], capture_output=True, check=False).returncode:
                return path
    raise RehearsalError(f"a rehearsal needs Python {PYTHON} with venv: install it")


def repository_files(root: Path) -> list[str]:
    """Return the files that travel with every call: all that git does not ignore."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (root / name).is_file()]


def rehearse(
    root: Path,
    folder: str,
    calls: Sequence[Call],
    library_path: str,
    log: Callable[[str], None],
) -> list[str]:
    """Make all calls, and return the problems.

    The files that the calls write stay in the folder `rehearsal` of the kit.

    Parameters
    ----------
    folder
        The kit, relative to the root of the repository.
    library_path
        Folders of libraries that stand in for a GPU's driver, or nothing.
    """
    problems = []
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        here = Path(scratch)
        environment = _environment(here, library_path, log)
        for call in calls:
            out = here / "out"
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            carried = call.carried(folder)
            for name in [*repository_files(root), *carried]:
                target = here / "machine" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, target)
            began = time.perf_counter()
            found = list(_problems_of(call, here, environment))
            took_s = time.perf_counter() - began
            shutil.copytree(out, root / folder / "rehearsal", dirs_exist_ok=True)
            log(f"{call.name}: carried {call.nbytes / MIB:.1f} MiB, took {took_s:.0f} s")
            problems += [f"{call.name}: {problem}" for problem in found]
    return problems


def _environment(here: Path, library_path: str, log: Callable[[str], None]) -> dict[str, str]:
    """Return variables of an environment that has the machine's packages and none of ours."""
    began = time.perf_counter()
    python = here / "python"
    subprocess.run([find_python(), "-m", "venv", str(python)], check=True)
    install = [str(python / "bin" / "pip"), "install", "-qq", *MACHINE]
    if subprocess.run(install, check=False).returncode:
        raise RehearsalError(f"pip cannot install what the machine has: {' '.join(MACHINE)}")
    log(f"installed the machine's packages in {time.perf_counter() - began:.0f} s")
    (here / "home").mkdir()
    environment = {
        "HOME": str(here / "home"),
        "LANG": "C.UTF-8",
        "OUT": str(here / "out"),
        "PATH": f"{python / 'bin'}:/usr/bin:/bin",
    }
    return environment | ({"LD_LIBRARY_PATH": library_path} if library_path else {})


def _problems_of(call: Call, here: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run the command of a call, and yield the problems."""
    try:
        done = subprocess.run(
            ["bash", "-c", call.command],
            cwd=here / "machine",
            env=dict(environment),
            timeout=call.most_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"took longer than {call.most_s:.0f} s"
        return
    if done.returncode:
        yield f"ended with {done.returncode}"
    files = sorted(path for path in (here / "out").rglob("*") if path.is_file())
    if sorted(path.name for path in files) != sorted(call.writes):
        yield f"wrote {[path.name for path in files]}, not {list(call.writes)}"
        return
    if len(files) > RESULT_FILES or any(path.stat().st_size > RESULT_NBYTES for path in files):
        yield f"wrote more than {RESULT_FILES} files of {RESULT_NBYTES // MIB} MiB"
    if call.name != DELIVER:
        yield from faults(json.loads((here / "out" / f"{call.name}.json").read_text()))


def faults(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems in the results of a step.

    Without a GPU, the lack of one is the only reason to skip. The section `facts` gives the reason
    in the same words as the tests.
    """
    if not results["is_complete"]:
        yield "is not complete"
    facts = [row for one in results["results"] if one["name"] == "facts" for row in one["rows"]]
    no_gpu = [row["skipped"] for row in facts if row["skipped"]] + ["no GPU"]
    for one in results["results"]:
        if one["problem"]:
            yield f"{one['name']} {one['problem']}"
        for test in one.get("tests", ()):
            if test["outcome"] == "skipped":
                if not any(reason in test["reason"] for reason in no_gpu):
                    yield f"{test['name']} is skipped: {test['reason']}"
            elif test["outcome"] != "passed":
                yield f"{test['name']} {test['outcome']}: {test['reason'][-300:]}"
        for row in one.get("rows", ()):
            if row["skipped"] and not any(reason in row["skipped"] for reason in no_gpu):
                yield f"{one['name']}, {row['name']}: {row['skipped']}"
        if not any(one.get(kind) for kind in ("modules", "tests", "rows")):
            yield f"{one['name']} has no result"
