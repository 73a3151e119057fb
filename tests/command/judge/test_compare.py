"""`dask gpurt compare` runs a program on both sides and says what differs, and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.command.judge import compare
from dask_gpurt.command.judge.turns import Turn
from tests.command.conftest import Outcome, Shell
from tests.limits import HANG_S
from tests.thoroughness import only_if_all

pytestmark = pytest.mark.cluster

SHUFFLE = """
import time
import dask.dataframe as dd, numpy as np, pandas as pd
began = time.perf_counter()
n = 20_000
df = dd.from_pandas(pd.DataFrame({"a": np.arange(n) % 97, "b": np.arange(n)}), npartitions=4)
print(len(df.shuffle("a").compute()), input())
print(f"took {time.perf_counter() - began} s")
"""
#: Whether the runtime is on, which a program should not ask.
IS_ON = """
import os
is_on = os.environ["DASK_GPURT__ENABLED"] == "true"
"""


def compared(shell: Shell, *args: str, stdin: str = "") -> tuple[Outcome, Any]:
    sizes = ["--n-workers", "2", "--threads", "1", "--repeats", "1"]
    outcome = shell.gpurt("compare", "--json", *sizes, *args, stdin=stdin)
    return outcome, outcome.json


@only_if_all
def test_a_shuffle_is_compared_on_both_sides(shell: Shell) -> None:
    shell.write("script.py", SHUFFLE)
    outcome, found = compared(shell, "script.py", stdin="a line\n")
    assert outcome.code == 0, outcome.err
    assert found["problem"] is None
    assert found["output"]["kind"] == "equal but for times, addresses and the like"
    (pair,) = found["pairs"]
    assert found["ratio"]["median"] == pytest.approx(pair["stock_s"] / pair["enabled_s"])
    stock, enabled = found["stock"], found["enabled"]
    assert stock["runs"] == {"gpurt": 0, "stock": 0}
    assert enabled["runs"] == {"gpurt": 1, "stock": 0}
    # Both sides were measured in the same way.
    for side in (stock, enabled):
        assert side["spent"]["task_s"] > 0
        assert side["spent"]["moved_nbytes"] > 0
        # A worker has imported pandas.
        assert 64 << 20 < side["peak_nbytes"] < 4 << 30
    assert found["expects_gain"]
    assert enabled["verdict"]["text"]
    assert "pair 1 of 1: stock Dask: " in outcome.err


def test_a_program_that_cannot_be_measured_is_a_problem(shell: Shell) -> None:
    shell.write("script.py", "import os\nprint('done', flush=True)\nos._exit(0)\n")
    outcome, found = compared(shell, "script.py")
    assert outcome.code == 2, outcome.err
    assert "ends with `os._exit`" in found["problem"]
    assert "Traceback" not in outcome.err


@only_if_all
def test_text_has_the_ratio_and_its_spread(shell: Shell) -> None:
    shell.write("package/__init__.py", "")
    shell.write("package/__main__.py", "import sys\nprint(sys.argv[1:])\n" + SHUFFLE)
    sizes = ["--n-workers", "1", "--threads", "2", "--repeats", "2"]
    outcome = shell.gpurt("compare", *sizes, "-m", "package", "--json", stdin="a line\n")
    assert outcome.code == 0, outcome.err
    assert "times as fast with dask_gpurt (" in outcome.out
    assert " over 2 pairs)" in outcome.out
    assert "output: equal but for times, addresses and the like" in outcome.out
    assert "shuffles: 1 with dask_gpurt, 0 left to stock Dask" in outcome.out
    assert "  peak process memory " in outcome.out


@only_if_all
def test_no_gain_is_expected_without_a_shuffle(shell: Shell) -> None:
    shell.write(
        "script.py", "import dask.array as da\nprint(da.ones(100, chunks=10).sum().compute())"
    )
    outcome, found = compared(shell, "script.py")
    assert (outcome.code, found["expects_gain"]) == (0, False)
    assert found["output"]["kind"] == "equal"


def test_a_gain_is_expected_where_memory_is_short() -> None:
    report = {"workers": {"a": {"threads": 1}}, "runs": {"gpurt": 0, "stock": 0}}
    for written_nbytes in (0, 1):
        spent = {"fetch_s": 0.0, "written_nbytes": written_nbytes}
        turn = Turn(0, "", [], {**report, "spent": spent, "wall_s": 1.0})
        assert compare._expects_gain([turn]) == bool(written_nbytes)


def test_a_program_without_a_cluster_says_so(shell: Shell) -> None:
    shell.write("script.py", "print('no Dask at all')")
    outcome = shell.gpurt("compare", "--repeats", "1", "script.py")
    assert outcome.code == 0, outcome.err
    assert "nothing ran on a cluster" in outcome.out
    assert "too short to compare: a run took less than 10 ms" in outcome.out
    assert "times as fast" not in outcome.out


def test_other_output_is_shown_as_a_diff(shell: Shell) -> None:
    shell.write("script.py", IS_ON + "print('same')\nprint('on' if is_on else 'off')")
    outcome = shell.gpurt("compare", "--repeats", "2", "script.py")
    assert outcome.code == 1
    assert "output: different" in outcome.out
    assert "    -off\n    +on" in outcome.out


def test_a_program_that_prints_anything_is_no_problem(shell: Shell) -> None:
    shell.write("script.py", "import random\nprint(random.random(), random.random())")
    outcome = shell.gpurt("compare", "--repeats", "2", "script.py")
    assert outcome.code == 0
    assert "note: it prints something else each time, on stock Dask as well" in outcome.out


def test_a_program_that_fails_on_stock_is_not_compared(shell: Shell) -> None:
    shell.write("script.py", "raise ValueError('of the program')")
    outcome, found = compared(shell, "script.py")
    assert outcome.code == 2
    assert found["problem"].startswith("it fails on stock Dask with exit status 1:\nTraceback")
    assert "ValueError: of the program" in found["problem"]
    assert found["pairs"] == []


def test_a_failure_of_the_runtime_alone_comes_first(shell: Shell) -> None:
    shell.write("script.py", IS_ON + "print('a')\nif is_on:\n    raise KeyError('broken')")
    outcome = shell.gpurt("compare", "script.py")
    assert outcome.code == 1
    _, second, *rest = outcome.out.splitlines()
    assert second == "  IT FAILS WITH DASK_GPURT ALONE, with exit status 1:"
    assert "KeyError: 'broken'" in outcome.out
    assert "`dask gpurt support-bundle`" in rest[-1]


def test_a_missing_script_and_too_little_time_are_errors(shell: Shell) -> None:
    outcome = shell.gpurt("compare", "absent.py")
    assert (outcome.code, outcome.out) == (2, "")
    assert "dask gpurt compare: cannot run absent.py" in outcome.err
    shell.write("script.py", "import threading\nthreading.Event().wait()")
    outcome = shell.gpurt("compare", "--minutes", "0.02", "script.py")
    assert outcome.code == 2
    assert "it did not end in time on stock Dask; --minutes allows more" in outcome.out


CONNECTS = """
import sys
from distributed import Client
with Client(sys.argv[1]) as client:
    print(client.submit(sum, [1, 2]).result())
"""


@only_if_all
def test_a_cluster_of_the_program_is_left_as_it_was(shell: Shell) -> None:
    shell.write("script.py", CONNECTS)
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        address = cluster.scheduler_address
        outcome = shell.gpurt("compare", "--json", "--repeats", "2", "script.py", address)
        assert outcome.code == 0, outcome.err
        assert len(outcome.json["pairs"]) == 2
        status = dask_gpurt.status(client)
        assert (status["active"], status["reason"]) == (False, "disabled by a client")
        # A cluster that has the runtime on has no stock side.
        dask_gpurt.enable(client)
        outcome = shell.gpurt("compare", "script.py", address)
        assert outcome.code == 2
        assert "the cluster switches dask_gpurt on by itself" in outcome.out
        assert dask_gpurt.status(client)["active"]


def test_a_failure_leaves_the_cluster_of_the_program_as_it_was(shell: Shell) -> None:
    shell.write("script.py", CONNECTS + IS_ON + "if is_on:\n    raise KeyError('broken')")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        outcome = shell.gpurt("compare", "script.py", cluster.scheduler_address)
        assert outcome.code == 1, outcome.err
        assert not dask_gpurt.status(client)["active"]


def test_ctrl_c_ends_the_program_and_its_cluster(shell: Shell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    shell.write(
        "script.py",
        """
import os, threading
from distributed import get_client
import dask
@dask.delayed
def begin(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    threading.Event().wait()
print(begin(os.path.abspath("begun")).compute())
""",
    )
    command = [sys.executable, "-m", "dask_gpurt.cli", "compare", "--json", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=shell.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        worker = psutil.Process(int((tmp_path / "begun").read_text()))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err.decode()
    assert json.loads(out)["problem"] == "interrupted"
    worker.wait(HANG_S)
    assert "Traceback" not in err.decode()
