"""`dask gpurt profile` runs a script, and writes and explains a trace of its cluster."""

from __future__ import annotations

import pytest

from dask_gpurt.metrics import total
from dask_gpurt.tracing import files
from dask_gpurt.tracing.events import WORKER
from dask_gpurt.tracing.lane_names import SEND
from tests.command.conftest import Shell
from tests.integration.processes import without_closing
from tests.thoroughness import only_if_all

pytestmark = pytest.mark.cluster

SHUFFLE = """
import dask.dataframe as dd, numpy as np, pandas as pd
n = 20_000
df = dd.from_pandas(pd.DataFrame({"a": np.arange(n) % 97, "b": np.arange(n)}), npartitions=4)
print(df.shuffle("a").b.sum().compute() == n * (n - 1) // 2)
"""
SIZE = ("--n-workers", "2", "--threads", "1")


def check_trace(path) -> None:
    """The trace has the messages and tasks of a shuffle between two workers."""
    trace = files.read(path)
    assert [one.kind for one in trace.processes].count(WORKER) == 2
    sent_nbytes = sum(one.nbytes for one in trace.work if one.path == SEND)
    assert sent_nbytes == total(one.counters for one in trace.processes)["sent_nbytes"] > 0
    keys = {one.key for one in trace.tasks}
    assert "p2pshuffle" in keys and any(key.endswith("shuffle-transfer") for key in keys)


def test_a_script_without_a_cluster(shell: Shell) -> None:
    shell.write("script.py", SHUFFLE)
    done = shell.gpurt("profile", *SIZE, "-o", "trace.json.gz", "script.py")
    assert (done.code, done.out) == (0, "True\n")
    assert "1 with dask_gpurt" in done.err
    assert "critical path" in done.err and "Traceback" not in without_closing(done.err)
    # The verdict is that of the trace.
    assert done.err.count("nothing stands out") <= 1
    last = done.err.index("  peak process memory  ")
    assert done.err[last:].splitlines()[1] == ""
    check_trace(shell.directory / "trace.json.gz")
    again = shell.gpurt("report", "trace.json.gz")
    assert again.code == 0 and again.out.strip() in done.err


@only_if_all
def test_a_script_with_its_own_cluster_that_fails(shell: Shell) -> None:
    shell.write(
        "script.py",
        """
import os
from distributed import Client
if __name__ == "__main__":
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None):
        exec(open("shuffle.py").read())
    os.chdir("/")
    raise ValueError("of the script")
""",
    )
    shell.write("shuffle.py", SHUFFLE)
    done = shell.gpurt("profile", "-o", "trace.json", "script.py")
    assert (done.code, done.out) == (1, "True\n")
    assert "ValueError: of the script" in done.err
    check_trace(shell.directory / "trace.json")


def test_a_script_without_dask(shell: Shell) -> None:
    shell.write("script.py", "print('no cluster')")
    done = shell.gpurt("profile", "script.py")
    assert (done.code, done.out) == (0, "no cluster\n")
    assert "no trace is written: the script connected to no cluster" in done.err
    assert not (shell.directory / "gpurt-trace.json.gz").exists()


def test_a_missing_folder_is_said_before_the_script_runs(shell: Shell) -> None:
    shell.write("script.py", "print('ran')")
    done = shell.gpurt("profile", "-o", "nowhere/trace.json", "script.py")
    assert done.code == 2 and done.out == ""
    assert "there is no folder nowhere" in done.err


def test_an_odd_ending_is_said_before_the_script_runs(shell: Shell) -> None:
    shell.write("script.py", "print('ran')")
    done = shell.gpurt("profile", "-o", "trace.txt", "script.py")
    assert done.code == 2 and done.out == ""
    assert "end it with .json" in done.err
