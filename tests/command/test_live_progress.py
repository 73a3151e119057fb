"""`dask_gpurt.progress` around blocks of a program in a terminal."""

from __future__ import annotations

import asyncio
import io
import math
import sys

import dask.dataframe as dd
import pandas as pd
import pytest
from dask.utils import format_bytes
from distributed import Client, LocalCluster
from distributed.utils_test import async_poll_for, gen_cluster

import dask_gpurt
from dask_gpurt.command.live import live_progress, live_view
from dask_gpurt.errors import ActivationError
from dask_gpurt.plugins import activation
from dask_gpurt.plugins.dashboard import gathering
from dask_gpurt.plugins.patches import p2p
from tests.integration.held_exchanges import all_say, held, rechunked, shuffled


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def local():
    """A client of a cluster in this process, with the runtime on."""
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        yield client


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch):
    """Have workers asked for each answer: data that is a second old has the previous exchange."""
    monkeypatch.setattr(gathering, "INTERVAL_S", 0)
    monkeypatch.setattr(gathering, "WORKERS_PER_S", math.inf)


def polls():
    return [task for task in asyncio.all_tasks() if task.get_name() == "gpurt-progress"]


async def count_polls():
    return len(polls())


@gen_cluster(client=True, nthreads=[("", 2)] * 2)
async def test_the_line_and_the_sum_are_those_of_the_block(c, s, a, b):
    await dask_gpurt.enable(c)
    async with held(c, s, shuffled(4), all_say):
        pass
    earlier = (await dask_gpurt.status(c))["totals"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", terminal := Terminal())
        async with dask_gpurt.progress(c), held(c, s, shuffled(5), all_say):
            await async_poll_for(lambda: "tasks, " in terminal.getvalue(), timeout=60)
    later = (await dask_gpurt.status(c))["totals"]
    moved = later["sent_nbytes"] - earlier["sent_nbytes"]
    assert 0 < moved < later["sent_nbytes"]
    line, report = terminal.getvalue().rsplit("\r", 1)
    assert "tasks, " in line
    assert "\n" not in line
    assert f"moved between workers  {format_bytes(moved)}\n" in report
    assert "1 with dask_gpurt, 0 with stock Dask" in report
    assert polls() == []


@gen_cluster(client=True, nthreads=[("", 2)] * 2)
async def test_a_scheduler_knows_how_far_its_exchanges_are(c, s, a, b):
    await dask_gpurt.enable(c)
    for outputs, n_outputs in ((shuffled, 4), (rechunked, 5)):
        async with held(c, s, outputs(n_outputs), all_say):
            shuffle = (await activation.overview(c))["shuffles"][-1]
            assert shuffle["is_open"]
            assert shuffle["progress"] == {
                "inputs": 4,
                "inputs_done": 3,
                "is_delivered": False,
                "outputs": n_outputs,
                "outputs_done": 0,
            }
        await async_poll_for(lambda: not p2p.how_far(s), timeout=60)
    await dask_gpurt.disable(c)
    assert await activation.overview(c) == {"active": False, "reason": "disabled by a client"}


@gen_cluster(client=True, nthreads=[("", 1)])
async def test_each_kind_of_client_has_its_kind_of_block(c, s, a):
    watch = dask_gpurt.progress(c)
    assert "`async with dask_gpurt.progress(client):`" in repr(watch)
    with pytest.raises(TypeError, match="this client is asynchronous; write `async with"), watch:
        pass


def test_shuffles_before_the_runtime_is_switched_off_count(local, capsys):
    frame = dd.from_pandas(pd.DataFrame({"a": range(1000)}), npartitions=4)
    with dask_gpurt.progress(local):
        for _ in range(3):
            dask_gpurt.enable(local)
            frame.shuffle("a").compute()
            nbytes = dask_gpurt.status(local)["totals"]["local_nbytes"]
            dask_gpurt.disable(local)
    report = capsys.readouterr().err
    assert "3 with dask_gpurt" in report
    assert nbytes and format_bytes(3 * nbytes) in report


def test_a_block_of_a_synchronous_client_must_not_be_async(local):
    async def use():
        async with dask_gpurt.progress(local):
            pass

    with pytest.raises(TypeError, match="not asynchronous; write `with dask_gpurt"):
        asyncio.run(use())


def test_a_failing_block_leaves_its_error_and_a_report(local, capsys):
    with pytest.raises(ZeroDivisionError), dask_gpurt.progress(local):
        assert local.sync(count_polls) == 1
        local.submit(divmod, 1, 0).result()
    report = capsys.readouterr().err
    assert "the block ended with ZeroDivisionError" in report
    assert "may be missing" not in report
    assert local.sync(count_polls) == 0


def test_a_client_that_closes_in_the_block_is_reported(local, capsys):
    with Client(local.cluster) as other:
        with dask_gpurt.progress(other):
            other.close()
        assert "the cluster did not answer at the end" in capsys.readouterr().err
        with (
            pytest.raises(ActivationError, match="not connected"),
            dask_gpurt.progress(other),
        ):
            pass
    assert capsys.readouterr().err == ""


def test_readings_that_fail_do_not_end_the_block(local, monkeypatch, capsys):
    failed = asyncio.Event()

    async def overview(client):
        failed.set()
        raise OSError("no answer")

    monkeypatch.setattr(live_progress.activation, "overview", overview)
    with dask_gpurt.progress(local):
        local.sync(failed.wait)
        assert local.submit(sum, [1, 2]).result() == 3
    assert "no answer" not in capsys.readouterr().err
    assert local.sync(count_polls) == 0


def test_a_runtime_that_is_off_is_named_in_the_report(local, capsys):
    dask_gpurt.disable(local)
    with dask_gpurt.progress(local):
        assert local.submit(sum, [1, 2]).result() == 3
    assert "not active on" in (report := capsys.readouterr().err)
    assert "disabled by a client" in report


def test_a_program_without_a_console_has_no_line(monkeypatch):
    """Services and windowed programs have no standard error."""
    monkeypatch.setattr(sys, "stderr", None)
    view = live_view.TerminalView(lambda: pytest.fail("nothing is drawn"))
    view.close({})
