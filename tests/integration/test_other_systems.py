"""Workers run on macOS without what it lacks; on Windows, clients work and workers stay stock.

Each program sees the other system through `other_system/sitecustomize.py`.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

import dask_gpurt
from tests.conftest import stock_client
from tests.integration.processes import run_program
from tests.integration.system_program import PROGRAM

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SITE = str(Path(__file__).with_name("other_system"))

ON_WORKERS = textwrap.dedent(PROGRAM).format(names=[], transport="auto", processes=True)

AS_CLIENT = """
    import json

    import dask
    import dask.dataframe as dd
    import numpy as np
    import pandas as pd
    from distributed import Client

    import dask_gpurt
    from dask_gpurt.collectives import Communicator

    def total(comm, blocks):
        return comm.allreduce(np.ones(4)).sum()

    if __name__ == "__main__":
        dask.config.set({"gpurt.enabled": True})
        frame = pd.DataFrame({"key": np.arange(20_000) % 999, "x": np.arange(20_000)})
        with Client(ADDRESS) as client:
            rows = dd.from_pandas(frame, npartitions=4).shuffle("key")
            with dask_gpurt.progress(client), dask_gpurt.trace(client, "trace.json.gz"):
                lengths = len(rows.compute())
            with Communicator(client) as group:
                totals = client.gather(group.run(total, []))
            future = client.submit(sum, [1, 2])
            future.result()
            print(json.dumps({
                "rows": lengths,
                "totals": sorted(set(totals)),
                "knows": dask_gpurt.explain(client, future)["known"],
                "runs": dask_gpurt.status(client)["runs"],
            }))
            dask_gpurt.disable(client)
            assert not dask_gpurt.status(client)["active"]
"""


def output_of(source, system, directory):
    """Run a program that sees another system; return its output."""
    ended = run_program(source, directory=directory, PYTHONPATH=SITE, OTHER_SYSTEM=system)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("system", "said"),
    [("darwin", "no page can be moved in this system"), ("win32", "not on Windows")],
)
def test_the_doctor_says_what_a_system_lacks(tmp_path, system, said):
    program = "from dask_gpurt.command.doctor import examine\nassert not examine(None, None, False)"
    ended = run_program(program, directory=tmp_path, PYTHONPATH=SITE, OTHER_SYSTEM=system)
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stdout
    assert "no problems" in ended.stdout


def test_workers_on_macos_shuffle_and_spill(tmp_path):
    found = output_of(ON_WORKERS, "darwin", tmp_path)
    assert found == {
        "runs": {"gpurt": 2, "stock": 0},
        "paths": ["comm"],
        "has_spilled": True,
        "not_ready": {},
    }


def test_workers_on_windows_leave_everything_to_stock_dask(tmp_path):
    found = output_of(ON_WORKERS, "win32", tmp_path)
    assert found["runs"]["gpurt"] == 0
    assert len(found["not_ready"]) == 2
    for problem in found["not_ready"].values():
        assert "not on Windows; run workers in WSL" in problem


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_clients_of_other_systems_use_workers_on_linux(tmp_path, system):
    with stock_client(2) as client:
        source = textwrap.dedent(AS_CLIENT).replace("ADDRESS", repr(client.scheduler.address))
        found = output_of(source, system, tmp_path)
        assert not dask_gpurt.status(client)["active"]
    assert found == {
        "rows": 20_000,
        "totals": [8.0],
        "knows": True,
        "runs": {"gpurt": 1, "stock": 0},
    }
    assert (tmp_path / "trace.json.gz").stat().st_size
