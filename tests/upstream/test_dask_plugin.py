"""The plugin for Dask's tests finds lost tests, and a sample of the tests passes."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import dask
import pytest

from tests.thoroughness import only_if_all
from tests.upstream.dask_plugin import DIFFERENCES, MOST_LOST, may_be_lost

SITE = Path(dask.__file__).parents[1]
#: Modules in which nearly all tests shuffle or rechunk. `make test-dask` runs the others.
FEW = ("dataframe/dask_expr/tests/test_merge.py", "array/tests/test_reshape.py")

PASSES = """
    import dask.array

    def test_passes():
        # This runs on the cluster, whichever scheduler is named.
        rows = dask.array.ones((4, 4), chunks=(1, 4)).rechunk((4, 1))
        assert rows.sum().compute(scheduler="sync") == 16
"""
FAILS = """
    def test_fails():
        raise ValueError
"""
LOST = """
    import dask_gpurt
    from distributed import get_client

    def test_lost():
        assert not dask_gpurt.status(get_client())["active"]
"""


def run(*tests: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-c", "tests/upstream/dask.ini"),
            *("--rootdir", str(SITE), "-p", "tests.upstream.dask_plugin"),
            *("-p", "no:cacheprovider", "-q", *map(str, tests)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )


def outcomes(output: str) -> dict[str, int]:
    line = output.strip().splitlines()[-1]
    return {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|xfailed|error)", line)}


@pytest.mark.slow
@pytest.mark.cluster
def test_that_passes_only_with_dask_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "test_three.py"
    path.write_text("".join(map(textwrap.dedent, (PASSES, FAILS, LOST))))
    done = run(path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes(done.stdout) == {"passed": 1, "xfailed": 1, "failed": 1}, done.stdout
    assert "test_lost" in re.findall(r"FAILED .*::(\w+)", done.stdout)
    assert re.search(
        r"[1-9] rechunks ran on dask_gpurt; 1 tests failed with it and with stock", done.stdout
    ), done.stdout


@only_if_all
@pytest.mark.slow
@pytest.mark.cluster
def test_sampled_tests_of_dask_are_not_lost() -> None:
    done = run("--cases=1", *(SITE / "dask" / path for path in FEW))
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(done.stdout)["passed"] > 30, done.stdout


def test_exceptions_are_few_and_have_reasons() -> None:
    reasons = may_be_lost(DIFFERENCES.read_text())
    assert len(reasons) <= MOST_LOST
    assert all(reasons.values())


@pytest.mark.parametrize("names", [["a"] * 2, [f"test_{i}" for i in range(MOST_LOST + 1)]])
def test_excess_and_duplicate_exceptions_are_refused(names: list[str]) -> None:
    with pytest.raises(pytest.UsageError, match="at most 5"):
        may_be_lost(f'[[lost]]\nreason = "r"\ntests = {names}')
