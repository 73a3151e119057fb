"""Values of CuPy and cuDF in the store of a worker: decomposed on a GPU, and on a live worker."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from dask_gpurt.devices.cuda.driver import CupyDriver
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.memory.host_tiers import PinnedTier
from tests.gpu.requirements import needs_gpu

pytestmark = needs_gpu

MIB = 1 << 20


@pytest.fixture
def packing():
    pytest.importorskip("distributed", reason="Dask is not installed")
    from dask_gpurt.frames.flat.values import flatten, restore
    from dask_gpurt.memory.device_values import LibraryCopies, library_packing
    from dask_gpurt.memory.tiers import Packing
    from dask_gpurt.plugins.memory.gpu_level import put_together, take_apart

    copies = LibraryCopies(CupyDriver())
    host = Packing(lambda value: value.nbytes, flatten, restore)
    return library_packing(lambda: copies, host, take_apart, put_together)


def again(packing, value):
    flat = packing.flatten(value).on_host()
    return packing.restore(flat.header, [array.copy() for array in flat.arrays])


@pytest.mark.parametrize("kind", ["plain", "transposed", "with gaps", "empty", "still computed"])
def test_cupy_array_is_spilled_and_read_back(packing, kind):
    import cupy

    array = cupy.arange(1 << 20, dtype=cupy.float64).reshape(1024, 1024)
    if kind == "transposed":
        array = array.T
    elif kind == "with gaps":
        array = array[::2, 3:]
    elif kind == "empty":
        array = array[:0]
    elif kind == "still computed":
        for _ in range(100):
            array = cupy.sin(array) + 1
    found = again(packing, array)
    assert type(found) is cupy.ndarray and found.dtype == array.dtype
    cupy.testing.assert_array_equal(found, array)


def test_pinned_blocks_are_the_only_host_memory_of_a_copy(packing, monkeypatch):
    import cupy

    pinned, ends = [], []
    driver = CupyDriver()

    def pin(nbytes):
        pinned.append(driver.pin(nbytes))
        return pinned[-1]

    def recording(kind, position):
        copy = getattr(CupyDriver, kind)

        def record(*arguments):
            ends.append((kind, arguments[position]))
            copy(*arguments)

        monkeypatch.setattr(CupyDriver, kind, record)

    recording("copy_out", 2)
    recording("copy_in", 4)
    tier = PinnedTier(PinnedPool(64 * MIB, pin=pin))
    array = cupy.arange(1 << 20, dtype=cupy.float64)
    place = tier.put(packing.flatten(array))
    with tier.lent(place) as (header, buffers):
        found = packing.restore(header, buffers)
    cupy.testing.assert_array_equal(found, array)
    for kind in ("copy_out", "copy_in"):
        assert sum(end.nbytes for one, end in ends if one == kind) == array.nbytes
    assert all(any(np.shares_memory(end, one) for one in pinned) for _, end in ends)
    tier.close()


def test_cudf_frame_is_spilled_and_read_back(packing):
    cudf = pytest.importorskip("cudf", reason="cuDF is not installed")
    frame = cudf.DataFrame(
        {
            "n": [1, None, 3, 4],
            "name": ["a", "bb", None, ""],
            "kind": cudf.Series(["x", "y", "x", None], dtype="category"),
            "list": [[1], [], [2, 3], None],
            "struct": [{"a": 1}, {"a": 2}, None, {"a": 4}],
        }
    )
    values = [frame, frame.iloc[1:3], frame.iloc[:0], frame["name"], frame.set_index("n").index]
    for value in values:
        found = again(packing, value)
        assert type(found) is type(value)
        assert found.to_arrow().equals(value.to_arrow())
    assert isinstance(again(packing, frame).index, cudf.RangeIndex)


@pytest.mark.parametrize("spilled_by", ["the store", "cuDF"])
def test_cudf_frame_that_was_spilled_is_cut(packing, spilled_by):
    """pylibcudf reads the memory of its columns by their addresses."""
    cudf = pytest.importorskip("cudf", reason="cuDF is not installed")
    from cudf.core.buffer.spill_manager import get_global_manager

    from dask_gpurt.frames.device.cudf_ import CudfTables

    with cudf.option_context("spill", spilled_by == "cuDF"):
        frame = cudf.DataFrame({"n": [1, None, 3], "name": ["a", "bb", None]})
        if spilled_by == "cuDF":
            assert get_global_manager().spill_device_memory(nbytes=1 << 40) > 0
        else:
            frame = again(packing, frame)
        tables, meta = CudfTables(), frame.head(0)
        table, kinds = tables.take_apart(frame, meta)
        found = tables.put_together(tables.gather(table, np.array([2, 0])), kinds, meta)
        assert found.to_pandas()["name"].tolist() == [None, "a"]


@contextlib.contextmanager
def small_pool():
    """Let CuPy allocate from a pool with a limit of 16 MiB."""
    import cupy

    before = cupy.cuda.get_allocator()
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=16 * MIB)
    cupy.cuda.set_allocator(pool.malloc)
    try:
        yield pool
    finally:
        cupy.cuda.set_allocator(before)


@contextlib.contextmanager
def live_worker(**settings):
    """Start an enabled worker in this process; yield it and a client."""
    pytest.importorskip("distributed", reason="Dask is not installed")
    import dask
    from distributed import Client, LocalCluster

    import dask_gpurt

    # RAPIDS and the tests share this process, so no limit may pause the worker.
    settings |= {"distributed.worker.memory.spill": False, "distributed.worker.memory.pause": False}
    options = {"n_workers": 1, "threads_per_worker": 2, "dashboard_address": ":0"}
    with (
        dask.config.set(settings),
        LocalCluster(processes=False, memory_limit=512 * MIB, **options) as local,
        Client(local) as client,
    ):
        dask_gpurt.enable(client)
        (worker,) = local.workers.values()
        yield worker, client


def full(number):
    import cupy

    return cupy.full(MIB, number, dtype=cupy.uint8)


def is_right(array, number):
    return bool((array == number).all())


def test_live_worker_spills_more_than_the_pool_holds():
    from distributed import wait

    settings = {"gpurt.memory.device": "8 MiB"}
    with small_pool() as pool, live_worker(**settings) as (worker, client):
        values = client.map(full, range(40), pure=False)
        wait(values)
        assert sum(worker.data.is_spilled(value.key) for value in values) >= 24
        assert all(client.gather(client.map(is_right, values, range(40), pure=False)))
        assert pool.total_bytes() <= 16 * MIB


def test_live_worker_learns_how_much_its_pool_holds():
    """Otherwise it would read values ahead that do not fit, and evict others for them."""
    from distributed import wait

    import dask_gpurt

    with small_pool(), live_worker() as (_, client):
        values = client.map(full, range(40), pure=False)
        wait(values)
        for _ in range(3):
            assert all(client.gather(client.map(is_right, values, range(40), pure=False)))
        (report,) = dask_gpurt.status(client)["workers"].values()
        levels = {level["name"]: level for level in report["memory"]["levels"]}
        assert levels["device"]["capacity_nbytes"] < 16 * MIB
        # Headers count too.
        assert report["memory"]["io"]["memory-read-bytes"] <= 3.1 * 40 * MIB
