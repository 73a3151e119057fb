"""Workers run under nsys: the right flags, a report for each process, also after a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from distributed import Client

from dask_gpurt.command.embedded import EmbeddedCluster
from dask_gpurt.command.traces import nsys_start
from dask_gpurt.command.traces.nsys_wrapper import profile_command
from tests.command.conftest import Shell
from tests.command.traces import nsys_standin
from tests.limits import HANG_S

MARK = "--multiprocessing-fork"


def reports(folder: Path, kind: str = "nsys-rep") -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*.{kind}"))]


def wait_for(condition, what: str) -> None:
    """Wait for files of other processes, which offer no event."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


@pytest.fixture
def start(tmp_path):
    """Start a Python program as multiprocessing starts a worker."""
    started = []
    nsys = nsys_standin.install(tmp_path / "bin")

    def run(code: str, *args: str, nsys: Path = nsys, **options) -> subprocess.Popen:
        words = [
            *(sys.executable, "-I", "-S", nsys_start.__file__),
            *(json.dumps(profile_command(str(nsys), tmp_path)), sys.executable, "-c", code, *args),
        ]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **options)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_runs_under_nsys_with_its_flags(start, tmp_path):
    process = start("print('ran')", MARK)
    assert process.communicate(timeout=HANG_S)[0] == "ran\n"
    (report,) = reports(tmp_path)
    assert report["verb"] == "profile"
    assert report["flags"] == [
        "--trace=cuda,nvtx,ucx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        f"--output={tmp_path}/worker-%h-%p",
    ]
    name = f"worker-{socket.gethostname()}-{report['pid']}.nsys-rep"
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_status_of_a_worker_passes(start, status):
    process = start(f"import sys; sys.exit({status})", MARK)
    assert process.wait(HANG_S) == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_signal_that_ended_a_worker_passes(start, tmp_path, number):
    process = start(f"import os; os.kill(os.getpid(), {int(number)})", MARK)
    assert process.wait(HANG_S) == -number
    assert [report["status"] for report in reports(tmp_path)] == [-number]


def test_other_processes_of_multiprocessing_are_not_wrapped(start, tmp_path):
    process = start("import os; print(os.getpid())")
    assert int(process.communicate(timeout=HANG_S)[0]) == process.pid
    assert reports(tmp_path) == []


RUNNING = "import sys, threading; print('runs', flush=True); threading.Event().wait()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_is_killed_leaves_a_report(start, tmp_path, number):
    process = start(RUNNING, MARK)
    assert process.stdout.readline() == "runs\n"
    process.send_signal(number)
    assert process.wait(HANG_S) == -number
    wait_for(lambda: reports(tmp_path), "no report was written")
    (report,) = reports(tmp_path)
    assert report["status"] == -number
    assert not Path(f"/proc/{report['pid']}").exists()


def test_pipes_of_a_worker_close_with_it(start, tmp_path):
    """Its parent takes the end of a pipe as the end of the worker."""
    theirs, ours = os.pipe()
    process = start("import os; os.close(0)", MARK, pass_fds=(ours,), stdin=subprocess.DEVNULL)
    os.close(ours)
    with os.fdopen(theirs) as pipe:
        assert pipe.read() == ""
    assert process.wait(HANG_S) == 0


def test_a_worker_gets_the_pipes_of_its_parent(start):
    theirs, ours = os.pipe()
    with os.fdopen(theirs) as pipe:
        start(f"import os; os.write({ours}, b'here')", MARK, pass_fds=(ours,))
        os.close(ours)
        assert pipe.read() == "here"


def test_a_worker_runs_where_nsys_does_not_start(start, tmp_path):
    process = start("print('ran')", MARK, nsys=tmp_path / "gone", stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=HANG_S)
    assert (process.returncode, out) == (0, "ran\n")
    (line,) = err.splitlines()
    assert f"{tmp_path}/gone cannot be started, so a worker runs without it" in line


def test_the_guide_has_the_same_command():
    guide = Path(__file__).parents[3] / "docs" / "guides" / "nsight.md"
    shown = " ".join(guide.read_text().split())
    command = " ".join(profile_command("nsys", Path("/shared/reports")))
    assert f"python: >- {command} python3" in shown


# ------------------------------------------------------------------ clusters


def end(code: int) -> None:
    os._exit(code)


@pytest.mark.cluster
def test_each_worker_has_a_report_also_after_a_restart(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "reports"
    folder.mkdir()
    nsys = nsys_standin.install(tmp_path / "bin")
    cluster = EmbeddedCluster(2, 1, (str(nsys), folder))
    try:
        with Client(cluster.address, security=cluster.security) as client:
            client.wait_for_workers(2)
            first = set(client.run(os.getpid).values())
            assert {report["pid"] for report in reports(folder, "begun")} == first
            killed, *_ = client.run(os.getpid)
            client.run(end, 3, workers=[killed], on_error="ignore")

            def pids() -> set[int]:
                return set(client.run(os.getpid, on_error="ignore").values())

            wait_for(lambda: len(pids()) == 2 and not pids() <= first, "no worker was restarted")
            assert pids() <= {report["pid"] for report in reports(folder, "begun")}
            assert list((tmp_path / "temporary").glob("gpurt-nsys-*"))
        cluster.grace_s = 0.0  # as after Ctrl-C: the other process is killed
    finally:
        cluster.close()
    assert not list((tmp_path / "temporary").glob("gpurt-nsys-*"))
    wait_for(lambda: len(reports(folder)) == 3, "a report is missing")
    statuses = sorted(report["status"] for report in reports(folder))
    assert 3 in statuses
    assert first <= {report["pid"] for report in reports(folder)}


PROGRAM = """
import dask.array as da
print(int(da.ones(100, chunks=50).sum().compute()))
"""


@pytest.mark.cluster
def test_run_wraps_the_workers_of_its_cluster(shell: Shell):
    nsys_standin.install(shell.directory / "bin")
    shell.write("script.py", PROGRAM)
    path = os.pathsep.join([str(shell.directory / "bin"), os.environ["PATH"]])
    outcome = shell.gpurt(
        *("run", "--n-workers", "2", "--nsys", "a folder/reports", "script.py"), env={"PATH": path}
    )
    assert (outcome.code, outcome.out) == (0, "100\n"), outcome.err
    folder = shell.directory / "a folder" / "reports"
    assert f"dask gpurt run: reports of Nsight Systems will be in {folder}\n" in outcome.err
    wait_for(lambda: len(reports(folder)) == 2, "a report is missing")


@pytest.mark.cluster
def test_without_nsys_one_line_says_so(shell: Shell):
    (shell.directory / "empty").mkdir()
    shell.write("script.py", PROGRAM)
    outcome = shell.gpurt(
        *("run", "--n-workers", "1", "--nsys", "reports", "script.py"),
        env={"PATH": str(shell.directory / "empty")},
    )
    assert (outcome.code, outcome.out) == (0, "100\n"), outcome.err
    lines = [line for line in outcome.err.splitlines() if "nsys" in line]
    assert lines == ["dask gpurt run: nsys is not on PATH: workers run without Nsight Systems"]


def test_a_program_without_our_cluster_is_told(shell: Shell):
    nsys_standin.install(shell.directory / "bin")
    shell.write("script.py", "print('alone')")
    path = os.pathsep.join([str(shell.directory / "bin"), os.environ["PATH"]])
    outcome = shell.gpurt("run", "--nsys", "reports", "script.py", env={"PATH": path})
    assert (outcome.code, outcome.out) == (0, "alone\n")
    assert "--nsys had no effect: no cluster was started for the script" in outcome.err


def test_a_folder_that_cannot_be_made_is_named(shell: Shell):
    shell.write("script.py", PROGRAM)
    shell.write("taken", "")
    outcome = shell.gpurt("run", "--nsys", "taken/reports", "script.py")
    assert outcome.code == 2
    assert "cannot make the folder taken/reports: Not a directory" in outcome.err
