"""The runner on the machine keeps results, ends processes, and names missing parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import dask_gpurt
from benchmarks.gpu.kit import outcomes
from benchmarks.gpu.kit import step as runner
from benchmarks.gpu.kit.archives import pack, read_manifest, write_manifest
from benchmarks.gpu.kit.rehearsal import faults
from benchmarks.gpu.kit.steps import Step, Work


@dataclass(frozen=True)
class Program(Work):
    """A process that runs this Python program."""

    text: str = ""

    def command(self, rows_path):
        return [sys.executable, "-c", self.text, rows_path]


@pytest.fixture
def kit(tmp_path):
    """A kit with one archive, which has one module."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "carried.py").write_text("__version__ = '7'\n")
    (tmp_path / "kit").mkdir()
    archive = pack(tmp_path / "source", tmp_path / "kit" / "one.tar.xz", 1 << 20, "")
    write_manifest(tmp_path / "kit", {"one": archive})
    return tmp_path / "kit"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def step(*works, imports=()):
    return Step("mine", "", ("one",), imports, works)


# ------------------------------------------------------------------ one process


def test_tests_before_a_crash_keep_their_outcomes(tmp_path, monkeypatch):
    module = tmp_path / "test_crash.py"
    module.write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_skipped(): pass\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise OSError('closing')\n"
        "def test_closing(broken): pass\n"
        "def test_crash(): os._exit(7)\n"
        "def test_never(): pass\n"
    )
    command = Work("test_crash", 60).command("")
    command[command.index("tests/gpu/test_crash.py")] = str(module)
    monkeypatch.setattr(Work, "command", lambda work, rows: command)
    found = runner.run(Work("test_crash", 60), os.environ, tmp_path / "log")
    assert found["problem"] == "ended with 7"
    assert [(one["name"].split("::")[1], one["outcome"]) for one in found["tests"]] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
        ("test_skipped", "skipped"),
        ("test_closing", "failed"),
        ("test_crash", outcomes.STARTED),
    ]
    reasons = [one["reason"] for one in found["tests"]]
    assert "1 == 2" in reasons[1]
    assert reasons[2] == "not here"
    assert "closing" in reasons[3]
    assert "2 failed, 1 passed, 1 skipped, 1 started; ended with 7" in runner.summary(found)


def test_module_that_cannot_be_imported_is_an_outcome(tmp_path, monkeypatch):
    module = tmp_path / "test_import.py"
    module.write_text("import no_such_module_at_all\n")
    command = Work("test_import", 60).command("")
    command[command.index("tests/gpu/test_import.py")] = str(module)
    monkeypatch.setattr(Work, "command", lambda work, rows: command)
    found = runner.run(Work("test_import", 60), os.environ, tmp_path / "log")
    assert "no_such_module_at_all" in found["tests"][-1]["reason"]
    assert found["problem"] == "ended with 2"


def test_process_at_its_limit_is_ended(tmp_path):
    work = Program("facts", 0.3, text="import threading; threading.Event().wait()")
    found = runner.run(work, os.environ, tmp_path / "log")
    assert found["problem"] == "took longer than 0.3 s"
    assert found["rows"] == []


def test_processes_left_behind_are_ended(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    child = f"import threading; file = open({str(pipe)!r}, 'w'); print(1, file=file, flush=True)"
    text = (
        "import subprocess, sys\n"
        f"child = {child!r} + '; print(2, flush=True); threading.Event().wait()'\n"
        "left = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "left.stdout.readline()\n"
    )
    found = runner.run(Program("facts", 60, text=text), os.environ, tmp_path / "log")
    assert found["problem"] == ""
    os.set_blocking(reader, True)
    with open(reader) as file:
        assert file.read() == "1\n"  # to the end: the process that had it open is gone


def test_rows_of_a_section_are_kept(tmp_path):
    rows = {"sections": {"facts": {"rows": [{"name": "device", "skipped": ""}]}}}
    text = f"import sys; open(sys.argv[1], 'w').write({json.dumps(rows)!r})"
    found = runner.run(Program("facts", 60, text=text), os.environ, tmp_path / "log")
    assert found["rows"] == [{"name": "device", "skipped": ""}]
    assert "1 rows, 0 skipped" in runner.summary(found)


def test_imports_name_what_is_missing_and_what_ends_the_process(tmp_path):
    (tmp_path / "deadly.py").write_text("import os; os._exit(3)")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = runner.import_all(["json", "no_such_module", "deadly", "csv"], environment)
    assert [one["name"] for one in found["modules"]] == ["json", "no_such_module"]
    assert "no_such_module: ModuleNotFoundError" in found["problem"]
    assert "deadly ended the process" in found["problem"]


# ------------------------------------------------------------------ a step


def test_results_are_written_after_each_process(kit, out, monkeypatch):
    ended = []

    def run(work, environment, log):
        if ended:
            raise KeyboardInterrupt
        ended.append(work.name)
        return {"name": work.name, "took_s": 0.0, "problem": "", "rows": []}

    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(KeyboardInterrupt):
        runner.run_step(step(Work("facts", 1), Work("copies", 1)), kit, out, {})
    results = json.loads((out / "mine.json").read_text())
    assert [one["name"] for one in results["results"]] == ["imports", "facts"]
    assert results["is_complete"] is False


def test_step_uses_its_archives_and_our_package_as_installed(kit):
    archives = read_manifest(kit)
    environment = runner.prepare(step(), kit, archives)
    text = (
        "import carried, dask, dask_gpurt\n"
        "from importlib.metadata import entry_points, version\n"
        "print(carried.__version__, version('dask-gpurt'))\n"
        "print(dask.config.get('gpurt.shuffle.transport'))\n"
        "print(entry_points(group='dask.sizeof')['gpurt'].value)\n"
        "print(dask_gpurt.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"7 {dask_gpurt.__version__}",
        "auto",
        "dask_gpurt.quiet:register",
        str(runner.ROOT / "dask_gpurt" / "__init__.py"),
    ]


def test_damaged_archive_ends_the_step_with_a_clear_error(kit, out, monkeypatch, capsys):
    monkeypatch.setattr(runner, "STEPS", [step()])
    with open(kit / "one.tar.xz", "ab") as file:
        file.write(b"more")
    assert runner.main(["mine", "--kit", str(kit), "--out", str(out)]) == 2
    assert "one.tar.xz is damaged" in capsys.readouterr().err


def test_archive_that_the_kit_lacks_is_named(kit, out, monkeypatch, capsys):
    monkeypatch.setattr(runner, "STEPS", [Step("mine", "", ("two",), (), ())])
    assert runner.main(["mine", "--kit", str(kit), "--out", str(out)]) == 2
    assert "has no archive two" in capsys.readouterr().err


@pytest.mark.parametrize("text, code", [("", 0), ("raise SystemExit(3)", 1)])
def test_step_ends_well_only_if_its_processes_do(kit, out, monkeypatch, capsys, text, code):
    works = (Program("facts", 60, text=text), Program("copies", 60))
    monkeypatch.setattr(runner, "STEPS", [step(*works)])
    assert runner.main(["mine", "--kit", str(kit), "--out", str(out)]) == code
    results = json.loads((out / "mine.json").read_text())
    assert results["is_complete"]
    assert [one["name"] for one in results["results"]] == ["imports", "facts", "copies"]
    assert "=== copies" in (out / "mine.log").read_text()


def test_delivery_lists_parts_and_checks_those_that_are_here(kit, out, capsys):
    arguments = [runner.DELIVER, "--kit", str(kit), "--out", str(out)]
    assert runner.main(arguments) == 0
    found = json.loads((out / "deliver.json").read_text())
    assert found == {"here": ["one.tar.xz"], "missing": []}
    (kit / "one.tar.xz").write_bytes(b"")
    assert runner.main(arguments) == 2
    (kit / "one.tar.xz").unlink()
    assert runner.main(arguments) == 0
    assert json.loads((out / "deliver.json").read_text())["missing"] == ["one.tar.xz"]


# ------------------------------------------------------------------ what a rehearsal accepts


def results(*more, is_complete=True):
    facts = {"name": "facts", "problem": "", "rows": [{"name": "facts", "skipped": "no driver"}]}
    return {"is_complete": is_complete, "results": [facts, *more]}


def of_test(outcome, reason=""):
    tests = [{"name": "test_it", "outcome": outcome, "reason": reason}]
    return {"name": "test_store", "problem": "", "tests": tests}


def of_section(skipped):
    return {"name": "copies", "problem": "", "rows": [{"name": "copies", "skipped": skipped}]}


@pytest.mark.parametrize(
    "result, expected",
    [
        (of_test("passed"), []),
        (of_test("skipped", "needs a GPU: no driver"), []),
        (
            of_test("skipped", "Dask is not installed"),
            ["test_it is skipped: Dask is not installed"],
        ),
        (of_test("failed", "1 == 2"), ["test_it failed: 1 == 2"]),
        (of_test(outcomes.STARTED), ["test_it started: "]),
        (of_section("no driver"), []),
        (of_section("ended with 1"), ["copies, copies: ended with 1"]),
        ({"name": "copies", "problem": "", "rows": []}, ["copies has no result"]),
        ({**of_section(""), "problem": "ended with 1"}, ["copies ended with 1"]),
    ],
)
def test_only_the_missing_gpu_is_a_reason_to_skip(result, expected):
    assert list(faults(results(result))) == expected


def test_step_that_was_cut_off_is_a_fault():
    assert list(faults(results(is_complete=False))) == ["is not complete"]
