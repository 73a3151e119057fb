"""CuPy's values on a real cluster of processes, compared with NumPy."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from tests.gpu.requirements import needs_gpu

pytestmark = [needs_gpu, pytest.mark.cluster]

MIB = 1 << 20


@pytest.fixture(scope="module")
def client():
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    import dask_gpurt

    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(**options, memory_limit=1 << 30) as local,
        distributed.Client(local, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        yield client


def on_device(block):
    import cupy

    return cupy.asarray(block)


def off_device(block):
    import cupy

    assert isinstance(block, cupy.ndarray), type(block)
    return cupy.asnumpy(block)


def test_arrays_are_rechunked_between_processes(client):
    import dask
    import dask.array as da

    import dask_gpurt

    before = dask_gpurt.status(client)["runs"]["gpurt"]
    whole = np.random.default_rng(1).random((600, 500))
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        lazy = da.from_array(whole, chunks=(100, 500)).map_blocks(on_device)
        lazy = lazy.rechunk((600, 125)).map_blocks(off_device, dtype=whole.dtype)
        got = client.gather(client.compute(lazy))
    np.testing.assert_array_equal(got, whole)
    assert dask_gpurt.status(client)["runs"] == {"gpurt": before + 1, "stock": 0}


def test_rows_of_arrays_are_shuffled_between_processes(client):
    """By two rechunks: rows are reordered on the device, between them. A shuffle needs cuDF."""
    import dask
    import dask.array as da

    order = np.random.default_rng(2).permutation(400)
    whole = np.arange(400 * 30, dtype=np.int32).reshape(400, 30)
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        lazy = da.from_array(whole, chunks=(50, 30)).map_blocks(on_device)
        by_column = lazy.rechunk((400, 10)).map_blocks(operator.itemgetter(order))
        rows = by_column.rechunk((80, 30)).map_blocks(off_device, dtype=whole.dtype)
        got = client.gather(client.compute(rows))
    np.testing.assert_array_equal(got, whole[order])


def test_arrays_are_sent_to_another_process_and_to_the_client(client):
    import cupy

    one, other = client.scheduler_info()["workers"]
    host = np.arange(200 * 300.0).reshape(200, 300)
    made = client.submit(on_device, host, workers=[one])
    moved = client.submit(off_device, made, workers=[other])
    np.testing.assert_array_equal(moved.result(), host)
    got = client.submit(on_device, host.T[::2], workers=[one]).result()
    assert isinstance(got, cupy.ndarray)
    np.testing.assert_array_equal(cupy.asnumpy(got), host.T[::2])


def exchanged(comm, _):
    """All operations on arrays of the device; results are there, too."""
    import cupy

    found = []
    for length in (5, 200_000):
        array = cupy.arange(length, dtype="f4") + comm.rank
        rows = cupy.ones((4, length), dtype="i8")
        results = [
            comm.allreduce(array),
            comm.reduce_scatter(rows, "max"),
            comm.all_gather(array),
            comm.broadcast(array, root=1),
        ]
        assert all(isinstance(one, cupy.ndarray) for one in results)
        found.append([cupy.asnumpy(one) for one in results])
    return found


def test_ranks_exchange_arrays_of_their_devices(client):
    from dask_gpurt.collectives import Communicator

    with Communicator(client) as comm:
        both = client.gather(comm.run(exchanged))
    for found in both:
        for length, results in zip((5, 200_000), found, strict=True):
            one = np.arange(length, dtype="f4")
            wanted = [one + (one + 1), np.ones((2, length)), np.stack([one, one + 1]), one + 1]
            for result, expected in zip(results, wanted, strict=True):
                np.testing.assert_array_equal(result, expected)
