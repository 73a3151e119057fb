"""The blocks of code in the quickstart and the guides run and print the outputs shown.

Blocks of a page run in order, in one folder that is also their home, as processes of their own. A
block of bash leaves its environment to the next ones. A comment in the line before a block can
change that:

    <!-- not run: REASON -->          the block needs a cluster, a GPU or a network, for example
    <!-- needs: SLURM -->             the page is run with a SLURM, in a checkout of the package
    <!-- any status: REASON -->       the command may exit with 1, which reports a problem
    <!-- file: NAME -->               the block is a file that later blocks use
    <!-- stays: TEXT -->              the command keeps running; the next block starts after TEXT
    <!-- output -->                   the block is the standard output of the last one
    <!-- output: standard error -->   ... on standard error

Numbers in an output may differ, and a line `...` matches any lines.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.deploy.slurm.throwaway import running_slurm
from tests.integration.processes import without_closing

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "docs" / "quickstart.md", *(ROOT / "docs" / "guides").glob("*.md")])
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+)(?:: (?P<said>[^\n]*?))? -->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
MARKS = {None, "not run", "needs", "any status", "file", "stays", "output"}
#: Marks of blocks that run to their end.
RUN = {None, "needs", "any status"}
LIMIT_S = 280
#: What an installation from a checkout reads.
CHECKOUT = ("dask_gpurt", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
#: Commands of the environment that the tests run in.
INSTALLED = pathlib.Path(sys.executable).parent
#: Folders of pip's settings and downloads, below the home.
PIP = (".config/pip", ".cache/pip")


class Block(NamedTuple):
    """A block of code, with the mark in the comment before it."""

    mark: str | None
    said: str
    language: str
    code: str


def blocks(page: pathlib.Path) -> list[Block]:
    """Return the blocks of a page in order."""
    return [
        Block(one["mark"], one["said"] or "", one["language"], one["code"])
        for one in BLOCK.finditer(page.read_text())
    ]


def runs(page: pathlib.Path) -> bool:
    """Return whether a page has a block to run."""
    return any(
        block.mark in RUN | {"stays"} and block.language in ("bash", "python")
        for block in blocks(page)
    )


@contextlib.contextmanager
def needs_met(page: pathlib.Path, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Provide what the blocks of a page need, or skip the test. Return the folder of its Python.

    A page with needs installs the package itself, so it begins with a Python that lacks it.
    """
    needs = {block.said for block in blocks(page) if block.mark == "needs"}
    assert needs <= {"SLURM"}
    if not needs:
        yield INSTALLED
        return
    pytest.importorskip("ensurepip", reason="makes a virtual environment")
    for name in CHECKOUT:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    for name in PIP:
        if (found := pathlib.Path.home() / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(found)
    with running_slurm():
        yield pathlib.Path(sys.base_prefix) / "bin"


def a_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def pattern_of(expected: str) -> str:
    """Return an expression for an output in which numbers, paths and gaps may differ."""
    lines = []
    for line in expected.splitlines():
        if line == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        parts = re.split(r"(\d[\d,.]*|\s+)", line)
        text = "".join(
            r"[\d,.]+" if part[:1].isdigit() else r"\s+" if part.isspace() else re.escape(part)
            for part in parts
        )
        # `compare` judges its own spread, and a busy machine makes it wide.
        more = "(: no difference beyond the spread)?" if line.endswith("pairs)") else ""
        lines.append(text.replace(r"\.venv/bin", r"\S+") + more + r"\s*\n")
    return "".join(lines)


class Shell:
    """Runs the blocks of one page in a folder, and ends processes that they left running."""

    def __init__(self, folder: pathlib.Path, scripts: pathlib.Path) -> None:
        self._folder = folder
        #: The environment at the end of a block of bash.
        self._left = folder / "block.environment"
        #: The test's own values for some in the pages.
        self._replaced = {"8786": str(a_free_port()), "ib0": "lo"}
        self._running: list[subprocess.Popen[str]] = []
        path = [one for one in os.environ["PATH"].split(os.pathsep) if one != str(INSTALLED)]
        self._environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("DASK_")},
            "PATH": os.pathsep.join([str(scripts), *path]),
            "HOME": str(folder),
            "COLUMNS": "200",
        }

    def _text(self, code: str) -> str:
        for shown, used in self._replaced.items():
            code = code.replace(shown, used)
        return code

    def save(self, name: str, code: str) -> None:
        """Write a block to a file of the folder."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._text(code))

    def _start(self, block: Block, *, stderr: int) -> subprocess.Popen[str]:
        path = self._folder / f"block.{block.language}"
        bash = ["bash", "-e", "-u", "-o", "pipefail"]
        last = f"env -0 > {self._left}\n" if block.language == "bash" else ""
        path.write_text(self._text(block.code) + last)
        process = subprocess.Popen(
            [*(bash if block.language == "bash" else ["python"]), str(path)],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def run(self, block: Block) -> tuple[str, str]:
        """Run a block, which has to exit with 0. Return its standard output and standard error.

        With the mark `any status`, it may exit with 1, but must not fail with a traceback.
        """
        process = self._start(block, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=LIMIT_S)
        said = f"{block.code}\nexits with {process.returncode}\n{output}\n{errors}"
        allowed = (0, 1) if block.mark == "any status" else (0,)
        errors = without_closing(errors)
        assert process.returncode in allowed and "Traceback" not in errors, said
        if process.returncode == 0 and block.language == "bash":
            variables = self._left.read_text().rstrip("\0").split("\0")
            self._environment = dict(one.split("=", 1) for one in variables)
        return output, errors

    def start(self, block: Block) -> None:
        """Start a block that keeps running, and wait until it has printed the text of its mark."""
        process = self._start(block, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if block.said in line:
                break
        else:
            pytest.fail(f"{block.code}\nended without {block.said}\n{''.join(lines)}")
        # The process goes on printing, and would block if nobody read its output.
        threading.Thread(target=process.stdout.read, daemon=True).start()

    def close(self) -> None:
        """End every process that a block started, and its children."""
        for process in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marks_are_known(page):
    text = page.read_text()
    assert {block.mark for block in blocks(page)} <= MARKS
    assert len(re.findall(r"^ *```\w", text, re.MULTILINE)) == len(blocks(page))
    for block in blocks(page):
        assert block.said or block.mark in (None, "output"), f"{block.mark} says nothing"


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=lambda page: page.stem)
def test_code_blocks_of_a_page_run_as_shown(page, tmp_path):
    with needs_met(page, tmp_path) as scripts:
        run_blocks(page, Shell(tmp_path, scripts))


def run_blocks(page: pathlib.Path, shell: Shell) -> None:
    """Run the blocks of a page, and compare what they print with what is shown."""
    output = errors = ""
    try:
        for block in blocks(page):
            if block.mark == "file":
                shell.save(block.said, block.code)
            elif block.mark == "stays":
                shell.start(block)
            elif block.mark == "output":
                printed = errors if block.said == "standard error" else output
                assert re.fullmatch(pattern_of(block.code), printed), printed
            elif block.mark in RUN and block.language in ("bash", "python"):
                output, errors = shell.run(block)
    finally:
        shell.close()
