"""A script runs under `dask gpurt run` as under Python, except for the report on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dask_gpurt.command.script import ScriptError, find_module
from tests.command.conftest import Outcome, Shell

LOOKS_AROUND = """
import sys, os
print(sys.argv)
print(sys.path[0])
print(__name__, __file__, __spec__ and __spec__.name, __package__)
print(sorted(globals()))
print(sys.modules["__main__"].__dict__ is globals())
"""


def both(shell: Shell, *args: str, stdin: str = "") -> tuple[Outcome, Outcome]:
    """Run the same script by plain Python and by `dask gpurt run`."""
    return shell.python(*args, stdin=stdin), shell.gpurt("run", *args, stdin=stdin)


def without_report(outcome: Outcome) -> str:
    return outcome.err.partition("dask gpurt: ")[0]


def test_script_sees_the_usual_globals_and_arguments(shell: Shell) -> None:
    shell.write("some dir/look.py", LOOKS_AROUND)
    args = ("some dir/look.py", "-x", "--help", "--report=a", "--", "--n-workers", "")
    plain, ours = both(shell, *args)
    assert ours.out == plain.out
    assert ours.code == plain.code == 0
    assert "nothing ran on a cluster" in ours.err


def test_symlinked_script_runs(shell: Shell, tmp_path: Path) -> None:
    shell.write("real/look.py", LOOKS_AROUND)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "look.py")
    plain, ours = both(shell, "link.py")
    assert ours.out == plain.out


@pytest.mark.parametrize("module", ["package.look", "package"])
def test_module_sees_the_usual_globals_and_arguments(shell: Shell, module: str) -> None:
    shell.write("package/__init__.py", "")
    shell.write("package/look.py", LOOKS_AROUND + "from package import helper\n")
    shell.write("package/__main__.py", LOOKS_AROUND + "from package import helper\n")
    shell.write("package/helper.py", "")
    plain, ours = both(shell, "-m", module, "-m", "x")
    assert ours.out == plain.out
    assert ours.code == plain.code == 0


def test_script_owns_stdin_and_stdout(shell: Shell) -> None:
    script = (
        "import sys\ndata = sys.stdin.buffer.read()\n"
        "sys.stdout.buffer.write(data + b'\\x00\\xc3\\xa4\\r\\n')\nprint('no newline', end='')\n"
    )
    shell.write("echo.py", script)
    plain, ours = both(shell, "echo.py", stdin="one\ntwo")
    assert ours.out == plain.out == "one\ntwo\x00ä\r\nno newline"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("sys.exit('too bad')", 1),
        ("sys.exit()", 0),
        ("x = = 1", 1),
        ("\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e", 1),
        ("def show(*a): print('mine', file=sys.stderr)\nsys.excepthook = show\n1 / 0", 1),
    ],
)
def test_exit_status_of_the_script_is_kept(shell: Shell, line: str, code: int) -> None:
    shell.write("end.py", f"import sys\nprint('begin')\n{line}\n")
    plain, ours = both(shell, "end.py")
    assert ours.code == plain.code == code
    assert ours.out == plain.out
    text = plain.err.strip()
    # The interpreter prints the argument of `sys.exit` after everything else.
    assert text in (without_report(ours).strip(), ours.err.strip().splitlines()[-1])


def test_keyboard_interrupt_ends_the_script(shell: Shell) -> None:
    shell.write("stop.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    outcome, report = shell.run("stop.py")
    assert outcome.code == report["exit_code"] == 130
    assert without_report(outcome).strip().endswith("KeyboardInterrupt")
    assert "dask_gpurt/command" not in outcome.err


def test_flag_reaches_configuration_and_child_processes(shell: Shell) -> None:
    child = "import dask; print(dask.config.get('gpurt.enabled'), dask.config.get('gpurt.strict'))"
    shell.write(
        "parent.py",
        "import dask, subprocess, sys\nprint(dask.config.get('gpurt.enabled'), flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n",
    )
    outcome = shell.gpurt("run", "--strict", "parent.py")
    assert outcome.out.split() == ["True", "True", "True"]


def test_script_that_computes_nothing_starts_nothing(shell: Shell) -> None:
    shell.write(
        "plan.py",
        "import dask, psutil\nx = dask.delayed(sum)([1, 2]) + 1\n"
        "print(len(psutil.Process().children()), type(x).__name__)\n",
    )
    outcome, report = shell.run("plan.py")
    assert outcome.out == "0 Delayed\n"
    assert report["clusters"] == []
    assert report["exit_code"] == 0


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("no.py",), "no such file"),
        ((".",), "is a directory"),
        (("-m", "no.such.module"), "no such module"),
        (("--report", "no/where.json", "here.py"), "no such directory"),
        (("--bad", "here.py"), "No such option"),
        (("--n-workers", "0", "here.py"), "--n-workers"),
        ((), "SCRIPT"),
    ],
)
def test_wrong_usage_is_an_error(shell: Shell, args: tuple[str, ...], why: str) -> None:
    shell.write("here.py", "print('ran')\n")
    outcome = shell.gpurt("run", *args)
    assert outcome.code == 2
    assert why in outcome.err.strip().splitlines()[-1]
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("needs", "ModuleNotFoundError: No module named 'absent'"),
        ("needs.job", "ModuleNotFoundError: No module named 'absent'"),
        ("needs.absent", "ModuleNotFoundError: No module named 'absent'"),
        ("fails", "ValueError: too bad"),
        ("fails.job", "ValueError: too bad"),
        ("empty", "it is a package, and has no __main__ to run"),
        ("empty.absent", "there is no such module"),
        ("math", "it is not a module of Python code"),
        ("numpy._core._multiarray_umath", "it is not a module of Python code"),
    ],
)
def test_modules_that_cannot_be_run_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, why: str
) -> None:
    lines = {"needs": "import absent", "fails": "raise ValueError('too bad')", "empty": ""}
    for name, line in lines.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(line)
        for inner in ("job", "__main__") if line else ("job",):
            (tmp_path / name / f"{inner}.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ScriptError) as caught:
        find_module(module, [])
    assert str(caught.value) == f"cannot run {module}: {why}"


def test_every_command_has_help() -> None:
    from click.testing import CliRunner

    from dask_gpurt.cli import gpurt

    for name in ("run", "doctor", "status", "demo"):
        for flag in ("-h", "--help"):
            result = CliRunner().invoke(gpurt, [name, flag])
            assert result.exit_code == 0
            assert result.output.startswith("Usage:")
    assert all(name in CliRunner().invoke(gpurt, ["--help"]).output for name in gpurt.commands)


def test_importing_the_command_line_is_cheap(shell: Shell) -> None:
    heavy = ("distributed", "pandas", "rich", "dask", "dask_gpurt.plugins", "dask_gpurt.command")
    code = f"import sys, dask_gpurt.cli; print([m for m in {heavy} if m in sys.modules])"
    assert shell.python("-c", code).out.strip() == "[]"


def test_demo_receives_the_command_line_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from dask_gpurt.cli import gpurt
    from dask_gpurt.demo import command

    given: dict[str, object] = {}

    def main(**options: object) -> int:
        given.update(options)
        return 1

    monkeypatch.setattr(command, "main", main)
    words = ["demo", "--scale", "2", "--quick", "--out-dir", "o", "--queries", "1, q3,", "--json"]
    assert CliRunner().invoke(gpurt, words).exit_code == 1
    assert given == {
        "scale": 2.0,
        "quick": True,
        "cache_dir": None,
        "out_dir": Path("o"),
        "json_output": True,
        "queries": ["1", "q3"],
    }
    assert CliRunner().invoke(gpurt, ["demo", "--queries", ","]).exit_code == 2
    assert CliRunner().invoke(gpurt, ["demo", "--scale", "0"]).exit_code == 2


def test_programs_run_with_the_current_python(shell: Shell) -> None:
    shell.write("who.py", "import sys\nprint(sys.executable)\n")
    assert shell.gpurt("run", "who.py").out.strip() == sys.executable
