"""Shuffles of emulated device frames on real clusters, also over UCX, equal those of stock Dask.

pandas frames are treated as device frames here. Their shards are in emulated device memory, which
raises an error if code reads it as host memory.
"""

from __future__ import annotations

from functools import partial

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from distributed.protocol import dask_serialize

import dask_gpurt
from dask_gpurt.devices.device_budget import DeviceBudget
from dask_gpurt.errors import TransportError
from dask_gpurt.frames.device.device_frames import DeviceFrames
from dask_gpurt.plugins.shuffle.array_run import DEVICE_ARRAYS
from dask_gpurt.plugins.shuffle.frame_run import ADAPTERS
from dask_gpurt.plugins.shuffle.transports import UcxTransport
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.transport.host_readings import HostReadings
from dask_gpurt.transport.shared import Borrower
from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.frames.emulated_device import (
    ARRAY,
    EmulatedArray,
    EmulatedArrays,
    EmulatedMemory,
    EmulatedTables,
    in_host_memory,
)
from tests.integration.comparing import assert_same_partitions, collection, partitions, runs
from tests.integration.test_transport import paths

ROWS = 40_000
N_INPUTS = 6


def frame(number):
    rng = np.random.default_rng(number)
    return pd.DataFrame(
        {
            "key": rng.integers(0, 1000, ROWS),
            "x": rng.random(ROWS),
            "name": pd.array(rng.choice(["a", "bb", None], ROWS), dtype="str"),
            "n": pd.array(np.where(rng.random(ROWS) > 0.5, 7, None), dtype="Int64"),
        }
    )


def shuffled():
    return collection([frame(number) for number in range(N_INPUTS)]).shuffle("key", npartitions=4)


@dask_serialize.register(EmulatedArray)
def left_to_pickle(array):
    """Leave arrays to pickle, because distributed would turn them into plain arrays."""
    raise NotImplementedError


class Device:
    """An emulated device for each worker, and the bytes copied from all of them to the host.

    Attributes
    ----------
    limits_nbytes
        Limits of the devices of the next workers.
    """

    def __init__(self):
        self.limits_nbytes = [1 << 30] * 2
        self.budgets = []
        self._began_nbytes = EmulatedMemory.copied_nbytes

    def adapter(self, spec):
        self.budgets.append(DeviceBudget(self.limits_nbytes.pop()))
        allocate_device = partial(self.budgets[-1].take, EmulatedMemory)
        return DeviceFrames(
            EmulatedTables(), spec.meta, spec.column, spec.drop_column, allocate_device
        )

    @property
    def copied_nbytes(self):
        return EmulatedMemory.copied_nbytes - self._began_nbytes


@pytest.fixture
def device(monkeypatch):
    device = Device()
    for name in ("pandas.DataFrame", "pandas.core.frame.DataFrame"):
        monkeypatch.setitem(ADAPTERS, name, device.adapter)
    return device


@pytest.fixture
def knows_devices(monkeypatch):
    """Make UCX accept device memory. It can read and write emulated memory in host memory.

    UCX also looks faster than TCP, as on machines with devices.
    """
    pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    if EmulatedMemory.provide is in_host_memory:
        monkeypatch.setattr(UcxEngine, "takes_device_memory", True)
    monkeypatch.setattr(HostReadings, "after", lambda readings, nbytes: None)


@pytest.fixture
def knows_no_devices(monkeypatch):
    monkeypatch.setattr(UcxEngine, "takes_device_memory", False)


def assert_same_as_stock(client):
    """Check that a shuffle equals stock Dask's, row by row in each partition."""
    expected = partitions(client, shuffled())
    dask_gpurt.enable(client)
    before = runs(client)["gpurt"]
    assert_same_partitions(partitions(client, shuffled()), expected)
    assert runs(client)["gpurt"] == before + 1


def sent_nbytes(client):
    return sum(
        worker["counters"]["sent_nbytes"]
        for worker in dask_gpurt.status(client)["workers"].values()
    )


def test_device_shards_travel_without_a_copy_to_the_host(client, device, knows_devices):
    assert_same_as_stock(client)
    assert paths(client)[0] == {"ucx"}
    # Only the description of the columns is copied from shards that arrive.
    assert sent_nbytes(client) > 1_000_000
    assert 0 < device.copied_nbytes < 50_000


def test_device_over_its_limit_receives_on_the_host(client, device, knows_devices):
    device.limits_nbytes = [1 << 30, 0]
    assert_same_as_stock(client)
    # One worker sends from its device. The shards of the other are already in host memory.
    assert paths(client)[0] == {"ucx", "shared"}
    assert device.copied_nbytes >= 1_000_000


@pytest.mark.parametrize("column", ["key", "name", "n"])
def test_series_is_shuffled_as_a_frame_of_one_column(client, device, column):
    def unique():
        series = collection([frame(number) for number in range(N_INPUTS)])[column]
        return partitions(client, series.drop_duplicates(split_out=4, shuffle_method="p2p"))

    expected = unique()
    dask_gpurt.enable(client)
    assert_same_partitions(unique(), expected)
    assert {type(one) for one in expected} == {pd.Series}
    assert runs(client) == {"gpurt": 1, "stock": 0}
    assert len(device.budgets) == 2


@pytest.fixture
def two_hosts(monkeypatch):
    """Make workers find no shared memory, as on two hosts."""

    def open_(borrower, offer):
        raise TransportError("another host")

    monkeypatch.setattr(Borrower, "open", open_)


@pytest.fixture(params=["send", "receive"])
def works_on_the_host_alone(request, monkeypatch):
    """Make UCX fail with device memory at one end; return the error text that peers report."""
    works = getattr(UcxEngine, request.param)

    async def of_the_host(engine, peer, number, buffers, deadline_s):
        if any(not isinstance(buffer, np.ndarray) for buffer in buffers):
            raise TransportError("unsupported memory")
        await works(engine, peer, number, buffers, deadline_s)

    monkeypatch.setattr(UcxEngine, request.param, of_the_host)
    with dask.config.set({"distributed.p2p.comm.retry.delay.min": "1ms"}):
        yield "unsupported memory" if request.param == "send" else "the peer could not receive"


def test_rows_arrive_when_ucx_fails_on_device_memory(
    client, device, knows_devices, works_on_the_host_alone
):
    assert_same_as_stock(client)
    names, reasons = paths(client)
    assert names == {"shared"}
    assert all(works_on_the_host_alone in why_not["device"] for why_not in reasons)


def test_ucx_carries_host_copies_between_hosts(
    client, device, knows_devices, two_hosts, works_on_the_host_alone
):
    assert_same_as_stock(client)
    names, reasons = paths(client)
    assert names == {"ucx"}
    assert all(works_on_the_host_alone in why_not["device"] for why_not in reasons)


def test_ucx_carries_host_copies_where_it_is_required(
    client, device, knows_devices, works_on_the_host_alone
):
    with dask.config.set({"gpurt.shuffle.transport": "ucx"}):
        assert_same_as_stock(client)
    assert paths(client)[0] == {"ucx"}
    assert device.copied_nbytes >= sent_nbytes(client)


def test_host_memory_is_shared_where_ucx_knows_no_device(client, device, knows_no_devices):
    assert_same_as_stock(client)
    names, reasons = paths(client)
    assert names == {"shared"}
    assert all("device" in reason for reason in reasons)
    assert device.copied_nbytes >= sent_nbytes(client)


@pytest.mark.parametrize("compression", ["auto", "lz4"])
def test_dask_connections_carry_a_host_copy(client, device, compression):
    settings = {"gpurt.shuffle.transport": "comm", "gpurt.shuffle.compression": compression}
    with dask.config.set(settings):
        assert_same_as_stock(client)
    assert paths(client)[0] == {"comm"}
    assert device.copied_nbytes >= sent_nbytes(client)


def test_requested_compression_runs_on_the_host(client, device, knows_devices):
    with dask.config.set({"gpurt.shuffle.compression": "zstd"}):
        assert_same_as_stock(client)
    assert device.copied_nbytes >= sent_nbytes(client)


def test_compression_for_a_slow_link_runs_on_the_host(client, device, knows_devices, monkeypatch):
    monkeypatch.setattr(UcxTransport, "bandwidth", 1_000_000)
    assert_same_as_stock(client)
    (shuffle,) = dask_gpurt.status(client)["shuffles"]
    assert shuffle["wire_nbytes"] < 0.8 * shuffle["sent_nbytes"]
    assert device.copied_nbytes >= sent_nbytes(client)


def test_shards_of_a_device_are_spilled(client, device, knows_devices):
    with dask.config.set({"gpurt.shuffle.memory": "1 MiB"}):
        assert_same_as_stock(client)
    counters = [worker["counters"] for worker in dask_gpurt.status(client)["workers"].values()]
    assert sum(counter["spilled_nbytes"] for counter in counters) > 1_000_000


def test_shuffle_leaves_nothing_on_the_device(client, device, knows_devices):
    assert_same_as_stock(client)
    workers = client.cluster.workers.values()
    client.sync(settled, workers)
    assert [budget.used_nbytes for budget in device.budgets] == [0, 0]


@pytest.mark.parametrize("transport", ["auto", "comm"])
def test_device_arrays_are_rechunked_on_the_device(
    client, device, knows_devices, transport, monkeypatch
):
    budget = DeviceBudget(1 << 30)
    monkeypatch.setitem(
        DEVICE_ARRAYS, ARRAY, lambda settings: EmulatedArrays(partial(budget.take, EmulatedMemory))
    )
    monkeypatch.delitem(DEVICE_ARRAYS, "cupy.ndarray")
    whole = np.arange(1_000_000.0).reshape(1000, 1000)
    lazy = da.from_array(whole, chunks=(100, 1000)).map_blocks(
        lambda block: block.view(EmulatedArray), meta=whole[:0, :0].view(EmulatedArray)
    )
    with dask.config.set({"gpurt.shuffle.transport": transport}):
        dask_gpurt.enable(client)
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        chunks = client.gather(
            client.compute(lazy.rechunk((1000, 200)).to_delayed().ravel().tolist())
        )
    for number, chunk in enumerate(chunks):
        assert type(chunk) is EmulatedArray
        np.testing.assert_array_equal(chunk, whole[:, 200 * number : 200 * (number + 1)])
    assert runs(client) == {"gpurt": 1, "stock": 0}
    copied_nbytes = 0 if transport == "auto" else sent_nbytes(client)
    assert device.copied_nbytes == copied_nbytes


async def settled(workers):
    """Return whether every run of these workers has ended."""
    for worker in workers:
        for run in tuple(runtime_of(worker)._runs):
            await run._closed_event.wait()
