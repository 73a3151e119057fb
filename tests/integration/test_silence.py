"""With the flag off, processes print the same lines as without this package."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.integration.environments import without
from tests.integration.processes import (
    command_line_cluster,
    environment,
    run_program,
    without_closing,
)

IN_ONE_PROCESS = """
import asyncio
from distributed import Client, Scheduler, Worker

async def main():
    async with Scheduler(port=0, dashboard_address=":0") as scheduler:
        async with Worker(scheduler.address, name="a") as worker:
            async with Client(scheduler.address, asynchronous=True) as client:
                print(await client.submit(sum, [1, 2]))

asyncio.run(main())
"""
#: The log must still have the line about a user's own preload.
WITH_A_PRELOAD = (
    """
import dask

dask.config.set({"distributed.worker.preload": ["wave"]})
"""
    + IN_ONE_PROCESS
)
#: A program that imports only the client.
OF_A_CLIENT = """
from distributed import Client

with Client(scheduler_file="scheduler.json", set_as_default=False) as client:
    print(client.submit(sum, [1, 2]).result())
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Return a Python like this one, but without the package."""
    return without(tmp_path_factory.mktemp("bare") / "environment", "dask_gpurt")


def lines(text):
    """Return the distinct lines of a log, sorted, without times, numbers and addresses."""
    text = without_closing(text)
    kept = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|tcp://\S+|worker-\w{8}\b|\d+", "N", text)
    return sorted({re.sub(r"\s+", " ", line) for line in kept.splitlines()})


@pytest.mark.cluster
@pytest.mark.parametrize("program", [IN_ONE_PROCESS, WITH_A_PRELOAD])
def test_program_prints_nothing_more_than_with_plain_dask(tmp_path, bare_python, program):
    said = []
    for python in (sys.executable, bare_python):
        # Dask has its own folder here. In the system's one, it logs when it removes old files.
        (folder := tmp_path / f"run{len(said)}").mkdir()
        said.append(
            run_program(
                program, directory=folder, python=python, DASK_TEMPORARY_DIRECTORY=str(folder)
            )
        )
    done, bare = said
    assert done.stdout == bare.stdout == "3\n"
    assert "gpurt" not in done.stderr
    assert lines(done.stderr) == lines(bare.stderr)
    if program == WITH_A_PRELOAD:
        assert "Creating preload: wave" in done.stderr


@pytest.mark.cluster
@pytest.mark.slow
def test_command_line_processes_print_nothing_more(tmp_path, bare_python):
    said = []
    for python in (sys.executable, bare_python):
        (folder := tmp_path / f"run{len(said)}").mkdir()
        with command_line_cluster(folder) as cluster:
            # Dask logs when it removes old files from the system's folder.
            cluster.scheduler(python=python, DASK_TEMPORARY_DIRECTORY=str(folder))
            cluster.worker(python=python, DASK_TEMPORARY_DIRECTORY=str(folder))
            client = run_program(OF_A_CLIENT, directory=folder, python=python)
        assert client.stdout == "3\n", client.stderr
        said.append([*map(lines, (client.stderr, *(log.read_text() for log in cluster.logs)))])
    assert "gpurt" not in str(said)
    assert said[0] == said[1]


def test_error_in_the_preload_is_logged():
    source = """
import asyncio
import dask_gpurt.preload
from distributed.preloading import process_preloads

async def main():
    await process_preloads(None, "dask_gpurt.preload", []).start()

dask_gpurt.preload._flag_is_set = lambda: 1 / 0
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Failed to start preload: dask_gpurt.preload" in done.stderr
    assert "Creating preload" not in done.stderr
