"""The CUDA stand-in against CUDA's documentation, as far as tests rely on it, and its faults."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standins import build
from tests.standins.device_links import needs_standin

pytestmark = needs_standin

#: Settings for programs that need some.
SETTINGS = {"environment_sets_faults": {"fail_allocation": 1}}


def programs(module: str) -> list[str]:
    """Return the programs of a module, without loading it: only they have the stand-in."""
    tree = ast.parse((build.HERE / f"{module}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(one, "id", "") == "program" for one in node.decorator_list)
    ]


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module in ("cuda_calls", "cuda_faults") for name in programs(module)],
    ids=lambda one: one,
)
def test_stand_in_does_as_documented(module, name):
    done = subprocess.run(
        [sys.executable, "-m", f"tests.standins.{module}", name],
        env=build.environment(**SETTINGS.get(name, {})),
        cwd=build.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_two_processes_compile_one_library(tmp_path):
    build_twice = (
        "from tests.standins.build import *; print(build(HERE / 'cuda', CUDA, Path(sys.argv[1])))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", build_twice, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(build.ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    found = {process.communicate(timeout=60)[0].strip() for process in processes}
    (folder,) = map(Path, found)
    assert sorted(path.name for path in folder.iterdir()) == sorted(build.CUDA)
    assert list(tmp_path.iterdir()) == [folder]


def test_missing_compiler_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "gcc" in build.why_not()
