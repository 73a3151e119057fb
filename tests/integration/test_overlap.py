"""Tasks continue while their shards are sent, or wait for delivery where configured."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import dask
import numpy as np
import pandas as pd
import pytest

import dask_gpurt
from dask_gpurt.devices.ledger import COMMUNICATION, COMPUTE, WAITING
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from tests.integration.comparing import collection, partitions

N_INPUTS = 6
ROWS = 40_000
PATIENCE_S = 30.0


def frame(number):
    rng = np.random.default_rng(number)
    return pd.DataFrame({"key": rng.integers(0, 1000, ROWS), "n": rng.integers(0, 9, ROWS)})


def enable(client, **settings):
    settings = {f"gpurt.shuffle.{name}": value for name, value in settings.items()}
    with dask.config.set({"gpurt.shuffle.transport": "comm", **settings}):
        dask_gpurt.enable(client)


def shuffled(client):
    """Return the result of a shuffle of compressible numbers."""
    lazy = collection([frame(number) for number in range(N_INPUTS)]).shuffle("key", npartitions=4)
    before = dask_gpurt.status(client)["runs"]["gpurt"]
    parts = partitions(client, lazy)
    assert dask_gpurt.status(client)["runs"]["gpurt"] == before + 1
    whole = pd.concat(parts).sort_values(["key", "n"], ignore_index=True)
    expected = pd.concat([frame(number) for number in range(N_INPUTS)])
    pd.testing.assert_frame_equal(whole, expected.sort_values(["key", "n"], ignore_index=True))


class Handed:
    """Records the ends of transfer tasks and how much was undelivered then."""

    def __init__(self, monkeypatch):
        self.undelivered_nbytes = []
        self.all_in = threading.Event()
        add_partition = ExchangeRun.add_partition

        def add(run, *args, **kwargs):
            result = add_partition(run, *args, **kwargs)
            self.undelivered_nbytes.append(run._outbox.waiting_nbytes)
            if len(self.undelivered_nbytes) == N_INPUTS:
                self.all_in.set()
            return result

        monkeypatch.setattr(ExchangeRun, "add_partition", add)


def test_tasks_end_before_their_shards_are_delivered(client, monkeypatch):
    handed = Handed(monkeypatch)
    receive = ExchangeRun.receive

    async def receive_late(run, data):
        assert await asyncio.to_thread(handed.all_in.wait, PATIENCE_S)
        return await receive(run, data)

    monkeypatch.setattr(ExchangeRun, "receive", receive_late)
    enable(client)
    shuffled(client)
    assert len(handed.undelivered_nbytes) == N_INPUTS
    assert all(handed.undelivered_nbytes)


def test_without_overlap_tasks_end_after_delivery(client, monkeypatch):
    handed = Handed(monkeypatch)
    enable(client, overlap=False)
    shuffled(client)
    assert handed.undelivered_nbytes == [0] * N_INPUTS
    assert dask_gpurt.status(client)["totals"]["sent_nbytes"] > 0


def test_without_overlap_a_failing_peer_fails_the_task(client, monkeypatch):
    async def receive_not(run, data):
        raise ZeroDivisionError("a peer's error")

    monkeypatch.setattr(ExchangeRun, "receive", receive_not)
    enable(client, overlap=False)
    with pytest.raises(RuntimeError, match=r"failed during transfer") as raised:
        shuffled(client)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def entries(dask_worker):
    return runtime_of(dask_worker).ledger.entries()


def test_ledger_has_entries_of_communication(client):
    enable(client, compression="lz4")
    shuffled(client)
    for found in client.run(entries).values():
        nbytes = Counter()
        for one in found:
            nbytes[one.lane, one.path] += one.nbytes
        lanes = {
            COMPUTE: {WAITING},
            COMMUNICATION: {"send", "receive", WAITING},
            "codec": {"encode", "decode"},
        }
        for lane, paths in lanes.items():
            assert {path for name, path in nbytes if name == lane} >= paths
        for path in ("encode", "decode"):
            assert nbytes["codec", path] > 0
        assert nbytes[COMMUNICATION, "send"] == nbytes["codec", "encode"]


def codec_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("gpurt codec")}


def test_threads_of_lanes_end_with_the_runtime(client):
    before = codec_threads()
    enable(client, compression="lz4")
    shuffled(client)
    of_ours = codec_threads() - before
    assert of_ours
    dask_gpurt.disable(client)
    for thread in of_ours:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    enable(client, compression="lz4")
    shuffled(client)
