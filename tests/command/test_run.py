"""`dask gpurt run` runs scripts on its own cluster or theirs, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from dask_gpurt.command.lazy_client import LazyClient
from dask_gpurt.command.run import threads_still_work
from tests.command.conftest import Shell
from tests.integration.processes import WITHOUT_HEARTBEATS
from tests.limits import HANG_S
from tests.thoroughness import only_if_all, some

pytestmark = pytest.mark.cluster

FRAME = """
import sys
import dask, numpy as np, pandas as pd, dask.dataframe as dd
n = 20_000
df = dd.from_pandas(pd.DataFrame({"a": np.arange(n) % 97, "b": np.arange(n)}), npartitions=4)
total = n * (n - 1) // 2
"""


#: A kind of DataFrame that stock Dask shuffles, and a visible effect of a task.
HELPER = """
import pandas as pd

class Labelled(pd.DataFrame):
    @property
    def _constructor(self):
        return Labelled

def shout():
    print("from a task", flush=True)
"""


def test_script_without_a_client_runs(shell: Shell) -> None:
    # No `if __name__ == "__main__"`: workers must not run this file again.
    shell.write(
        "script.py",
        FRAME
        + """
from dask.utils import get_default_shuffle_method
import helper
print("once")
kept = df.shuffle("a").persist()
assert type(next(iter(kept.dask.values()))).__name__ != "DataFrame"
assert kept.b.sum().compute() == total
assert get_default_shuffle_method() == "p2p"
assert len(kept) == n
assert df.set_index("a").map_partitions(len).compute().sum() == n
assert len(df.merge(df, on="b").compute()) == n
def through_main(part):
    helper.shout()
    return part
import dask.array as da
x = da.ones((200, 200), chunks=(200, 10)).rechunk((10, 200))
assert x.sum().compute() == 40_000
labelled = df.map_partitions(helper.Labelled)
assert len(labelled.shuffle("a").compute()) == n
assert len(df.partitions[:1].map_partitions(through_main, meta=df._meta).compute()) == n // 4
print(input())
""",
    )
    shell.write("helper.py", HELPER)
    outcome, report = shell.run("--n-workers", "2", "--progress", "script.py", stdin="a line\n")
    assert (outcome.code, report["exit_code"]) == (0, 0), outcome.err
    assert sorted(outcome.out.splitlines()) == ["a line", "from a task", "once"]
    assert report["runs"]["gpurt"] >= 3
    assert report["runs"]["stock"] == 1
    (fallback,) = report["fallbacks"]
    assert (fallback["what"], fallback["count"]) == ("shuffle of helper.Labelled", 1)
    assert fallback["why"] in outcome.err.partition("dask gpurt: ")[2]
    assert report["sent_nbytes"] > 0
    assert report["local_nbytes"] > 0
    assert report["wall_s"] > 0
    (cluster,) = report["clusters"]
    assert cluster["active"]
    assert cluster["workers"] == 2
    assert "moved between workers" in outcome.err


@only_if_all
def test_script_that_asks_for_threads_keeps_them(shell: Shell) -> None:
    shell.write(
        "script.py",
        FRAME
        + """
def length(df, **how):
    return len(df.shuffle("a").compute(**how))
assert length(df, scheduler="threads") == n
assert len(df.shuffle("a").persist(scheduler="sync").compute(scheduler="sync")) == n
import distributed
df.shuffle("a").optimize()
try:
    distributed.get_client()
except ValueError:
    print("no cluster")
assert distributed.default_client() is distributed.get_client()
assert length(df) == n
print(type(distributed.get_client()).__name__)
assert length(df, scheduler="threads") == n
with dask.config.set(scheduler="sync"):
    assert length(df.sort_values("b")) == n
""",
    )
    outcome, report = shell.run("--n-workers", "1", "--threads", "2", "script.py")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines() == ["no cluster", "Client"]
    assert report["runs"] == {"gpurt": 1, "stock": 0}


def test_workers_have_the_memory_that_was_asked_for(shell: Shell) -> None:
    shell.write(
        "script.py",
        """
import dask, distributed

@dask.delayed
def limit():
    return distributed.get_worker().memory_manager.memory_limit

print(limit().compute())
""",
    )
    outcome, _ = shell.run("--n-workers", "1", "--memory-limit", "700 MiB", "script.py")
    assert (outcome.code, outcome.out) == (0, f"{700 << 20}\n"), outcome.err


@pytest.mark.parametrize("size", ["much", "0", "-1 GiB", ""])
def test_a_wrong_memory_limit_is_one_clear_error(shell: Shell, size: str) -> None:
    outcome = shell.gpurt("run", "--memory-limit", size, "script.py")
    assert outcome.code == 2
    assert f"{size!r} is not a size such as '2 GiB'" in outcome.err


def test_threads_that_outlive_the_script_finish(shell: Shell) -> None:
    """The interpreter waits for these threads, so the cluster has to stay up for them."""
    for name in ("begun", "over"):
        os.mkfifo(shell.directory / name)
    shell.write(
        "script.py",
        """
import sys, threading
import dask

def task():
    open("begun", "w").close()
    open("over").close()
    return 42

def compute():
    print("computed", dask.delayed(task)().compute())

def wake():
    threading.main_thread().join()
    open("over", "w").close()

threading.Thread(target=wake).start()
threading.Thread(target=compute).start()
open("begun").close()
print("main is over")
sys.exit(3)
""",
    )
    shell.env.update(WITHOUT_HEARTBEATS)
    outcome, found = shell.run("--n-workers", "1", "script.py")
    assert outcome.out == "main is over\ncomputed 42\n", outcome.err
    assert (outcome.code, found["exit_code"]) == (3, 3)
    assert "Traceback" not in outcome.err
    assert [one["workers"] for one in found["clusters"]] == [1]


@only_if_all
@pytest.mark.slow
@pytest.mark.parametrize("code", some(["number() + 1", "5"], 1))
def test_forked_child_of_a_script_ends_as_with_plain_python(shell: Shell, code: str) -> None:
    """The child must not close the cluster of its parent or report its work."""
    shell.write(
        "script.py",
        f"""
import atexit, os, sys
import dask

def number():
    return dask.delayed(int)(6).compute()

print(number(), flush=True)
child = os.fork()
if child == 0:
    atexit.register(print, "child ends")
    sys.exit({code})
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(number() + 2)
""",
    )
    shell.env.update(WITHOUT_HEARTBEATS)
    outcome, found = shell.run("--n-workers", "1", "script.py")
    ended = "7" if "number" in code else code
    assert (outcome.code, outcome.out) == (0, f"6\nchild ends\n{ended}\n8\n"), outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.count("dask gpurt: ") == 1
    assert found["exit_code"] == 0
    assert len(found["clusters"]) == 1


def test_run_waits_for_a_pool_until_it_is_idle() -> None:
    """The process may have other children, but only of pytest, ended, or daemons."""
    began, go_on = threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return go_on.wait(HANG_S)

    with ThreadPoolExecutor(1) as pool:
        before = threads_still_work()
        busy = pool.submit(work)
        assert began.wait(HANG_S)
        assert threads_still_work()
        go_on.set()
        assert busy.result()
        while threads_still_work() != before:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("ending", some(["left open", "cluster first", "with", "shutdown"], 1))
def test_script_with_its_own_cluster_uses_it(shell: Shell, ending: str) -> None:
    shell.write(
        "script.py",
        FRAME
        + """
from distributed import Client, LocalCluster
def work():
    assert df.shuffle("a").b.sum().compute() == total
if __name__ == "__main__":
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    client = Client(cluster)
    work()
    if sys.argv[1] == "with":
        with cluster, client:
            pass
    elif sys.argv[1] == "cluster first":
        cluster.close()
    elif sys.argv[1] == "shutdown":
        client.shutdown()
    print("done")
""",
    )
    outcome, report = shell.run("script.py", ending)
    assert (outcome.code, outcome.out) == (0, "done\n"), outcome.err
    # The report is complete without a reading after the end of the cluster.
    assert report["runs"] == {"gpurt": 1, "stock": 0}
    totals = report["totals"]
    assert totals["partitions_in"] == totals["partitions_out"] == 4
    assert totals["sent_nbytes"] == totals["received_nbytes"] > 0
    assert len(report["clusters"]) == 1


def test_a_cluster_in_the_process_of_the_script_may_stay_open(shell: Shell) -> None:
    """distributed closes its client at the end, when no thread can start any more."""
    options = "processes=False, n_workers=2, threads_per_worker=1, dashboard_address=':0'"
    shell.write(
        "script.py",
        FRAME
        + f"from distributed import Client\nclient = Client({options})\n"
        + "assert df.shuffle('a').b.sum().compute() == total\n",
    )
    outcome, report = shell.run("script.py")
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    assert report["runs"] == {"gpurt": 1, "stock": 0}


def test_strict_run_refuses_unsupported_work(shell: Shell) -> None:
    shell.write("helper.py", HELPER)
    shell.write(
        "script.py",
        FRAME
        + "import helper\nlabelled = df.map_partitions(helper.Labelled)\n"
        + "print(len(labelled.shuffle('a').compute()))\n",
    )
    outcome, report = shell.run("--strict", "--n-workers", "1", "script.py")
    assert outcome.code == report["exit_code"] == 1
    assert "gpurt.strict" in outcome.err
    assert outcome.out == ""


SUMS_TO_A_FILE = """
import pathlib
import dask.array as da
pathlib.Path("sum.txt").write_text(str(da.ones(100, chunks=50).sum().compute()))
"""

STUCK_TASK = (
    "import dask, threading\ndef wait():\n    print('waits', flush=True)\n"
    "    threading.Event().wait()\ndask.delayed(wait)().compute()\n"
)
STUCK_START = "import threading\nprint('waits', flush=True)\nthreading.Event().wait()\n"


@pytest.mark.parametrize(
    ("number", "preload"),
    some([(signal.SIGKILL, STUCK_START), (signal.SIGKILL, ""), (signal.SIGINT, "")], 2),
)
def test_run_leaves_no_process_behind(shell: Shell, number: signal.Signals, preload: str) -> None:
    """Whether a task of the script never ends, or already the start of its worker."""
    shell.write("stuck.py", STUCK_TASK)
    shell.write("preload.py", preload)
    process = subprocess.Popen(
        [sys.executable, "-m", "dask_gpurt.cli", "run", "--n-workers", "1", "stuck.py"],
        cwd=shell.directory,
        env={**shell.env, "DASK_DISTRIBUTED__WORKER__PRELOAD": "['preload.py']"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        # With no processes left, their pipes are closed.
        _, err = process.communicate(timeout=HANG_S)
    _, alive = psutil.wait_procs(children, timeout=HANG_S)
    assert not alive
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in err


@pytest.mark.cluster
def test_run_starts_a_cluster_without_standard_streams(shell: Shell) -> None:
    """A pipe that took the place of one of them would never end."""
    shell.write("sums.py", SUMS_TO_A_FILE)
    command = f"{sys.executable} -m dask_gpurt.cli run --n-workers 1 sums.py <&- >&- 2>&-"
    subprocess.run(command, shell=True, cwd=shell.directory, env=shell.env, timeout=HANG_S)
    assert (shell.directory / "sum.txt").read_text() == "100.0"


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_working_directory_that_is_gone_is_named(shell: Shell, command: str) -> None:
    script = shell.write("sums.py", SUMS_TO_A_FILE)
    (shell.directory / "gone").mkdir()
    line = f"cd gone && rmdir ../gone && {sys.executable} -m dask_gpurt.cli {command} {script}"
    done = subprocess.run(
        line, shell=True, cwd=shell.directory, env=shell.env, timeout=HANG_S, capture_output=True
    )
    assert done.returncode
    assert b"the working directory does not exist any more" in done.stdout + done.stderr


def test_configured_scheduler_is_respected(shell: Shell) -> None:
    shell.write(
        "sum.py", "import dask, os\nprint(dask.delayed(os.getpid)().compute() == os.getpid())"
    )
    shell.env["DASK_SCHEDULER"] = "threads"
    outcome, report = shell.run("sum.py")
    assert outcome.out == "True\n"
    assert report["clusters"] == []
    assert "'threads'" in outcome.err


def test_lazy_client_has_no_effect_elsewhere() -> None:
    def start() -> None:
        raise AssertionError("started")

    lazy = LazyClient(start)  # type: ignore[arg-type]
    assert lazy
    assert lazy != ""
    assert json.loads(json.dumps({"scheduler": lazy})) == {"scheduler": ""}
    copy = pickle.loads(pickle.dumps(lazy))
    assert type(copy) is str
    assert copy == ""
    lazy.close()
