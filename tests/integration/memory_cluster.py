"""A helper that starts a cluster whose workers hold little in memory."""

from __future__ import annotations

import contextlib
import pathlib
import time

import dask
import numpy as np
from dask import delayed
from distributed import Client, LocalCluster

import dask_gpurt

MIB = 1 << 20

#: Limits on the memory of the whole process are off, because all workers share one process.
MANAGED_ALONE = {
    "distributed.worker.memory.target": 0.6,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


@contextlib.contextmanager
def cluster(memory_limit=32 * MIB, n_workers=2, n_threads=1, enable=True, **config):
    settings = {**MANAGED_ALONE, "gpurt.enabled": False, **config}
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=n_threads,
            processes=False,
            protocol="tcp://",
            memory_limit=memory_limit,
            dashboard_address=":0",
            silence_logs=False,
        ) as local,
        Client(local) as client,
    ):
        if enable:
            dask_gpurt.enable(client)
        yield client


def stores(client):
    return [worker.data for worker in client.cluster.workers.values()]


def until(is_so):
    give_up = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up


def on_disk(client):
    return sum(len(store.disk) for store in stores(client))


@delayed(pure=False)
def block(number, nbytes=4 * MIB):
    return np.full(nbytes // 8, number, dtype=np.int64)


def files(client):
    return [
        path
        for worker in client.cluster.workers.values()
        for path in pathlib.Path(worker.local_directory).glob("dask-gpurt-values-*/*")
        if path.stat().st_size > MIB
    ]
