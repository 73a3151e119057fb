"""Traces of clusters of processes: the command, clocks that differ, workers without the package."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import dask
import pytest

import dask_gpurt
from benchmarks import hosts
from dask_gpurt.tracing import files, merge
from tests.integration.processes import WITHOUT_PACKAGE, command_line_cluster, environment
from tests.integration.traced import assert_messages_match, shuffled
from tests.limits import HANG_S

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SKEW = Path(__file__).with_name("skewed_clock.py")


def monotonic_times(_number: int) -> tuple[float, float]:
    """Return the begin and the end of this call on the clock that all processes here share."""
    began_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    sum(range(50_000))  # about a millisecond
    return began_s, time.clock_gettime(time.CLOCK_MONOTONIC)


def test_clocks_of_two_namespaces_differ_by_less_than_two_ms(tmp_path, monkeypatch):
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    if os.path.exists(f"/sys/class/net/{hosts.BRIDGE}"):
        pytest.skip("another program uses the namespaces")
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__PRELOAD", str(SKEW))
    monkeypatch.setenv("GPURT_TEST_SKEWED", "1")
    merged, begins = merge.merged, []

    def noted(*arguments, **more):
        begins.append(arguments[2])
        return merged(*arguments, **more)

    monkeypatch.setattr(merge, "merged", noted)
    with hosts.hosts(2) as names, hosts.cluster(names) as client:
        dask_gpurt.enable(client)
        with dask_gpurt.trace(client, tmp_path / "x.json", keys="full") as traced:
            with dask.config.set(scheduler=client.get):
                client.compute(shuffled()).result()
            futures = client.map(monotonic_times, range(200), key="times", pure=False)
            times = dict(zip([one.key for one in futures], client.gather(futures), strict=True))
    trace = traced.trace
    assert_messages_match(trace)
    assert len({one.host for one in trace.processes[1:]}) == 2
    (began_s,) = begins
    tasks = {task.key: task for task in trace.tasks}
    for key, (start_s, end_s) in times.items():
        # Where processors are busy, messages take longer, and the trace says so.
        stated_s = trace.processes[tasks[key].process].clock_error_s
        assert stated_s > 0
        error_s = max(2e-3, stated_s)
        # A task may only wait for the interpreter between Dask's clock and its own.
        assert tasks[key].start_s + began_s <= start_s + error_s
        assert tasks[key].end_s + began_s >= end_s - error_s
    starts = sorted(abs(tasks[key].start_s + began_s - one[0]) for key, one in times.items())
    assert starts[len(starts) // 2] <= 2e-3


def test_workers_without_the_package_are_named(tmp_path):
    with command_line_cluster(tmp_path) as cluster:
        cluster.scheduler()
        cluster.worker("--no-nanny", "--name", "with")
        cluster.worker("--no-nanny", "--name", "without", before=WITHOUT_PACKAGE)
        with cluster.client() as client:
            client.wait_for_workers(2, timeout=HANG_S)
            with dask_gpurt.trace(client, tmp_path / "x.json") as traced:
                client.gather(client.map(time.sleep, [0.002] * 20, pure=False))
            log = cluster.log_text()
    ended = {one.name: one.ended for one in traced.trace.processes}
    assert ended["without"] == "no events: dask-gpurt is not installed there"
    assert ended["with"] == ended["scheduler"] == ""
    # Dask's own times stand in.
    assert len(traced.trace.tasks) == 20
    assert "Traceback" not in log


def command(cluster, *arguments):
    program = [sys.executable, "-m", "dask", "gpurt", "trace"]
    file = str(cluster._directory / "scheduler.json")
    return subprocess.Popen(
        [*program, "--scheduler-file", file, *arguments],
        cwd=cluster._directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_traced(client):
    def is_on(dask_scheduler):
        trace = dask_scheduler.extensions.get("gpurt-trace")
        return trace is not None and trace.has_begun

    return client.run_on_scheduler(is_on)


def test_the_command_says_that_the_scheduler_is_gone(tmp_path):
    with command_line_cluster(tmp_path) as cluster:
        scheduler = cluster.scheduler()
        cluster.worker("--no-nanny")
        with cluster.client() as client:
            client.wait_for_workers(1, timeout=HANG_S)
            tracing = command(cluster, "--seconds", "600", "-o", "x.json")
            while not is_traced(client):
                assert tracing.poll() is None, tracing.communicate()
        scheduler.kill()
        _, error = tracing.communicate(timeout=HANG_S)
    assert tracing.returncode == 2, error
    assert "lost the scheduler" in error
    assert "Traceback" not in error
    assert not (tmp_path / "x.json").exists()


def test_the_command_writes_a_trace_and_ctrl_c_ends_it(tmp_path):
    with command_line_cluster(tmp_path) as cluster:
        cluster.scheduler()
        cluster.worker("--no-nanny")
        with cluster.client() as client:
            client.wait_for_workers(1, timeout=HANG_S)
            long = command(cluster, "--seconds", "600", "-o", "long.json")
            while not is_traced(client):
                assert long.poll() is None, long.communicate()
            client.gather(client.map(time.sleep, [0.002] * 20, pure=False))
            second = command(cluster, "--seconds", "1", "-o", "second.json")
            said, error = second.communicate(timeout=HANG_S)
            assert second.returncode == 2 and "is on already" in error
            assert "Traceback" not in error
            # Until the program has its handler, a signal would end it.
            long.send_signal(signal.SIGINT)
            said, error = long.communicate(timeout=HANG_S)
            assert long.returncode == 0, error
            assert "events of 1 workers" in said and "The runtime is off" in said
            assert len(files.read(tmp_path / "long.json").tasks) == 20
            assert not (tmp_path / "second.json").exists()
            nowhere = command(cluster, "-o", "none/x.json")
            _, error = nowhere.communicate(timeout=HANG_S)
            assert nowhere.returncode == 2 and "no folder" in error
            assert not is_traced(client)
