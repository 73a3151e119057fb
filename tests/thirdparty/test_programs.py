"""Programs that use other packages have the same results with the flag as without it.

Each program of `programs/` runs twice as `python program.py`: with the flag and without. Its last
line of output has its results as JSON. Most need packages of the `thirdparty`
extra. `make test-thirdparty` installs all of them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import WITHOUT_HEARTBEATS, environment
from tests.thoroughness import some

HERE = Path(__file__).parent
#: A program takes up to 20 s on an idle core.
TIMEOUT_S = 300

#: Packages that each program needs besides the runtime's own.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "futures": (),
    "xarray_zarr": ("xarray", "zarr"),
    "bags_and_files": (),
    "dask_ml_pipeline": ("dask_ml",),
    "flox_groups": ("flox",),
    "geopandas_join": ("dask_geopandas",),
    "joblib_search": ("sklearn",),
    "lightgbm_train": ("lightgbm",),
    "prefect_flow": ("prefect_dask",),
    "sparse_arrays": ("sparse",),
    "xgboost_train": ("xgboost",),
}

#: Relative difference allowed for floats, whose sums depend on the order.
RELATIVE_ERROR = 1e-5


def run(name: str, folder: Path, is_enabled: bool) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    out, log = folder / "stdout.txt", folder / "stderr.txt"
    # Files, not pipes: servers that a program started and left would hold its pipes open.
    with out.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "programs" / f"{name}.py")],
            cwd=folder,
            env=environment(
                DASK_GPURT__ENABLED=str(is_enabled),
                DASK_DISTRIBUTED__CLIENT__PRELOAD=f"['dask_gpurt.preload', '{HERE / 'tell.py'}']",
                PREFECT_HOME=str(folder / "prefect"),
                PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=str(TIMEOUT_S),
                **WITHOUT_HEARTBEATS,
            ),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        process.wait(TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(
        process.args, process.returncode, out.read_text(), log.read_text()
    )


def tracebacks(log: str) -> collections.Counter[str]:
    """Count the last lines of all tracebacks in a log, without parts that differ between runs."""
    found: collections.Counter[str] = collections.Counter()
    is_inside = False
    for line in log.splitlines():
        if line.lstrip().startswith("Traceback (most recent call last)"):
            is_inside = True
        elif is_inside and line and not line.startswith(" "):
            found[re.sub(r"0x[0-9a-f]+|\d+", "#", line)] += 1
            is_inside = False
    return found


def assert_same(enabled: object, stock: object) -> None:
    """Check that two JSON values are equal, except for the last digits of floats."""
    assert type(enabled) is type(stock), (enabled, stock)
    if isinstance(stock, dict):
        assert list(enabled) == list(stock)  # type: ignore[call-overload]
        for key, value in stock.items():
            assert_same(enabled[key], value)  # type: ignore[index]
    elif isinstance(stock, list):
        assert len(enabled) == len(stock)  # type: ignore[arg-type]
        for one, other in zip(enabled, stock, strict=True):  # type: ignore[call-overload]
            assert_same(one, other)
    elif isinstance(stock, float):
        assert enabled == pytest.approx(stock, rel=RELATIVE_ERROR, abs=RELATIVE_ERROR)
    else:
        assert enabled == stock


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(2 * TIMEOUT_S + 60)
@pytest.mark.parametrize("name", some(PROGRAMS, 1))
def test_program_gives_results_of_dask_without_a_traceback(name: str, tmp_path: Path) -> None:
    for package in PROGRAMS[name]:
        pytest.importorskip(package, reason=f"{package} of the thirdparty extra is not installed")
    stock = run(name, tmp_path / "stock", is_enabled=False)
    enabled = run(name, tmp_path / "enabled", is_enabled=True)
    assert (stock.returncode, enabled.returncode) == (0, 0), stock.stderr + enabled.stderr
    assert told(tmp_path / "stock") == {"False"}
    assert told(tmp_path / "enabled") == {"True"}
    assert_same(*(json.loads(run.stdout.splitlines()[-1]) for run in (enabled, stock)))
    more = tracebacks(enabled.stderr) - tracebacks(stock.stderr)
    assert not more, enabled.stderr


def told(folder: Path) -> set[str]:
    """Return whether the runtime was on, as the clients of a program reported."""
    return {path.read_text().strip() for path in folder.glob("*.told")}


def test_tracebacks_are_compared_by_their_last_lines() -> None:
    log = """line
Traceback (most recent call last):
  File "a.py", line 3, in f
    raise KeyError
KeyError: 'key-17'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 5, in f
KeyError: 'key-4'
2026 more
"""
    assert tracebacks(log) == {"KeyError: 'key-#'": 2}


@pytest.mark.parametrize("pair", [(1, 2), (1.0, 1), ([1], [1, 1]), ({"a": 1.0}, {"a": 1.1})])
def test_different_values_are_not_equal(pair: tuple[object, object]) -> None:
    with pytest.raises(AssertionError):
        assert_same(*pair)


def test_last_digits_of_floats_may_differ() -> None:
    assert_same({"a": [1.0, "b", None]}, {"a": [1.0000001, "b", None]})
