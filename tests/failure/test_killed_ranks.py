"""A process that is killed while its rank runs: all others get an error soon, and go on without."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import dask_gpurt
from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import RankLostError
from dask_gpurt.plugins.collectives.groups.operation_run import OperationRun

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def kill_in(rank, epoch):
    """Have the process of a rank kill itself as it begins an operation."""
    carry_out = OperationRun._carry_out

    async def dying(run, number, one):
        if (run._member.rank, run.epoch) == (rank, epoch):
            os.kill(os.getpid(), signal.SIGKILL)
        await carry_out(run, number, one)

    OperationRun._carry_out = dying


def sums(comm, _, n):
    return [float(comm.allreduce(np.ones(n))[0]) for _ in range(3)]


def kills_itself(comm, _):
    """The process dies while its rank computes, and the others wait for it."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.allreduce(1)


def lost_by_all(comm, futures, victim):
    others = [future for rank, future in enumerate(futures) if rank != victim]
    wait(others)
    for future in others:
        error = future.exception()
        assert type(error) is RankLostError
        assert (error.rank, error.address) == (victim, comm.workers[victim])


def test_the_others_of_a_killed_process_go_on_without_it():
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        # The timeout is long: a loss is noticed without it.
        comm = Communicator(client, sorted(client.scheduler_info()["workers"]), timeout="1 hour")
        for n, victim in ((10, 3), (1_000_000, 0)):
            dead = sorted(comm.workers)[victim]
            client.run(kill_in, victim, 1, workers=[dead])
            with comm:
                lost_by_all(comm, comm.run(sums, None, n), victim)
            comm = comm.rebuild()
            size = len(comm.workers)
            with comm:
                assert client.gather(comm.run(sums, None, n)) == [[float(size)] * 3] * size
        assert size == 2
        lost_by_all(comm, comm.run(kills_itself), 1)
