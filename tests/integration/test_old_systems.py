"""Programs work on a Python without newer functions of `os`, and on an old kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import textwrap

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import dask_gpurt
from tests.conftest import stock_client
from tests.integration.comparing import partitions
from tests.integration.processes import run_program
from tests.integration.system_program import PROGRAM
from tests.thoroughness import only_if_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HAS_UCX = importlib.util.find_spec("ucxx") is not None

#: Functions that such a Python, or its kernel, does not have.
LACKS = {
    "memory": ["memfd_create", "MFD_CLOEXEC"],
    "events": ["eventfd", "eventfd_read", "eventfd_write", "EFD_NONBLOCK", "EFD_CLOEXEC"],
    "vectors": ["preadv", "pwritev", "preadv2"],
    "disks": ["O_DIRECT", "posix_fallocate", "posix_fadvise", "copy_file_range", "sendfile"],
    "processors": ["sched_getaffinity", "sched_setaffinity", "waitid"],
}
EVERYTHING = [name for names in LACKS.values() for name in names]

WITHOUT = """
import fcntl, os
for name in {names}:
    if hasattr(os, name):
        delattr(os, name)
for name in ("F_GET_SEALS", "F_ADD_SEALS", "F_OFD_SETLK"):
    if hasattr(fcntl, name):
        delattr(fcntl, name)
if {is_old_kernel}:
    import errno
    from dask_gpurt import system_calls

    def refuse(*arguments):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    system_calls._call = refuse
"""


def outcome(directory, names, *, transport="auto", processes=False, is_old_kernel=False):
    """Run a program that shuffles, spills and checks its rows; return its output."""
    site = directory / "site"
    site.mkdir()
    about = {"names": names, "is_old_kernel": is_old_kernel}
    (site / "sitecustomize.py").write_text(WITHOUT.format(**about))
    source = textwrap.dedent(PROGRAM).format(names=names, transport=transport, processes=processes)
    ended = run_program(source, directory=directory, PYTHONPATH=str(site))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def ours(*paths):
    return {
        "runs": {"gpurt": 2, "stock": 0},
        "paths": list(paths),
        "has_spilled": True,
        "not_ready": {},
    }


@pytest.mark.parametrize("what", LACKS)
def test_python_without_one_system_call_works(monkeypatch, what):
    for name in LACKS[what]:
        monkeypatch.delattr(os, name, raising=False)
    frame = pd.DataFrame({"key": np.arange(20_000) % 999, "x": np.arange(20_000)})
    settings = {"gpurt.shuffle.memory": "16 KiB", "distributed.worker.memory.target": 1e-3}
    with dask.config.set({**settings, "distributed.worker.memory.spill": False}):
        with stock_client(2) as client:
            dask_gpurt.enable(client)
            found = pd.concat(
                partitions(client, dd.from_pandas(frame, npartitions=4).shuffle("key"))
            )
            found = found.sort_values("x").reset_index(drop=True)
            pd.testing.assert_frame_equal(found, frame)
            block = client.submit(np.arange, 1 << 22)
            assert client.submit(np.sum, block).result() == sum(range(1 << 22))
            status = dask_gpurt.status(client)
            assert status["runs"] == {"gpurt": 1, "stock": 0} and not status["not_ready"]
            assert status["totals"]["spilled_nbytes"]


@only_if_all
def test_python_without_all_system_calls_works(tmp_path):
    assert outcome(tmp_path, EVERYTHING, processes=True) == ours("shared")


@pytest.mark.skipif(not HAS_UCX, reason="the ucx extra is not installed")
def test_ucx_works_on_a_python_without_system_calls(tmp_path):
    assert outcome(tmp_path, EVERYTHING, transport="ucx") == ours("ucx")


def test_kernel_without_shared_memory_uses_other_transports(tmp_path):
    """Without memory files nothing can be shared, so UCX or Dask's connections remain."""
    found = outcome(tmp_path, EVERYTHING, is_old_kernel=True, processes=True)
    assert found == ours("ucx" if HAS_UCX else "comm")
