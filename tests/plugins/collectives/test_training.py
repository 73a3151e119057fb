"""Programs that train on several workers find the models that one process finds."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.collectives import Communicator
from dask_gpurt.errors import CollectiveError
from tests.plugins.collectives.gang import on_cluster

THREE = [("127.0.0.1", 1), ("127.0.0.2", 1), ("127.0.0.3", 1)]


def logistic(comm, blocks, n_steps, rate):
    """Logistic regression by gradient descent; `comm` is None for one process."""
    w = np.zeros(blocks[0][0].shape[1])
    n = sum(len(y) for _, y in blocks)
    n = int(n if comm is None else comm.allreduce(n))
    for _ in range(n_steps):
        gradient = sum(x.T @ (1 / (1 + np.exp(-x @ w)) - y) for x, y in blocks)
        if comm is not None:
            gradient = comm.allreduce(gradient)
        w = w - rate / n * gradient
    return w


@on_cluster(THREE)
async def test_logistic_regression(c, s, *workers):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 5))
    y = (x @ np.arange(5.0) + rng.normal(size=3000) > 0).astype(float)
    pair = da.from_array(x, chunks=(500, 5)), da.from_array(y, chunks=500)
    async with Communicator(c) as comm:
        found = await c.gather(await comm.run(logistic, pair, 50, 1.0))
    assert len({w.tobytes() for w in found}) == 1
    alone = logistic(None, [(x, y)], 50, 1.0)
    np.testing.assert_allclose(found[0], alone, rtol=1e-10)
    assert ((x @ alone > 0) == y).mean() > 0.9


def k_means(comm, blocks, centres, n_steps):
    x = np.concatenate(blocks)
    for _ in range(n_steps):
        nearest = ((x[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=1)
        sums = np.zeros((len(centres), x.shape[1] + 1))
        np.add.at(sums, nearest, np.c_[x, np.ones(len(x))])
        total = sums if comm is None else comm.allreduce(sums)
        centres = total[:, :-1] / total[:, -1:]
    return centres


@on_cluster(THREE)
async def test_k_means(c, s, *workers):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1200, 2)) + rng.choice([-9, 0, 9], size=(1200, 1))
    array = da.from_array(x, chunks=(200, 2))
    async with Communicator(c) as comm:
        found = await c.gather(await comm.run(k_means, array, x[:3], 10))
    assert len({centres.tobytes() for centres in found}) == 1
    np.testing.assert_allclose(found[0], k_means(None, [x], x[:3], 10))


def environments(comm, _):
    return comm.torch_env()


@on_cluster([("127.0.0.1", 1)] * 2 + [("127.0.0.2", 1)])
async def test_the_environment_of_torch_names_ranks_and_hosts(c, s, *workers):
    async with Communicator(c) as comm:
        found = await c.gather(await comm.run(environments))
    assert len({one["MASTER_PORT"] for one in found}) == 1
    assert {one["MASTER_ADDR"] for one in found} == {"127.0.0.1"}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [tuple(one[name] for name in names) for one in found] == [
        ("0", "3", "0", "2"),
        ("1", "3", "1", "2"),
        ("2", "3", "0", "1"),
    ]


def lacks_nccl(comm, _):
    with pytest.raises(CollectiveError, match=r"rank 0: .*; rank 1: .*; rank 2: ") as error:
        comm.nccl()
    return str(error.value)


@on_cluster(THREE)
async def test_nccl_is_refused_with_the_reason_of_each_rank(c, s, *workers):
    async with Communicator(c) as comm:
        texts = await c.gather(await comm.run(lacks_nccl))
    assert len(set(texts)) == 1 and "NCCL" in texts[0]


@on_cluster(THREE)
async def test_torch_in_one_process_is_refused(c, s, *workers):
    async with Communicator(c) as comm:
        futures = await comm.run_torch(environments)
        error = await futures[0].exception()
    assert isinstance(error, CollectiveError)
    assert "start workers as processes" in str(error) or "pip install torch" in str(error)


def data_parallel(comm, blocks, n_steps):
    """Ten steps of a small network with DistributedDataParallel."""
    import torch

    torch.manual_seed(comm.rank)  # it copies the parameters of rank 0 to all ranks
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.from_numpy(np.concatenate(blocks)).float()
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = ((model(x)[:, 0] - x.sum(dim=1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.distributed.get_backend(), losses, [one.tolist() for one in model.parameters()]


def fails_after_a_while(comm, _):
    import torch

    torch.distributed.barrier()
    if comm.rank == 1:
        raise ValueError("it is 7")
    torch.distributed.barrier()


@pytest.mark.cluster
@pytest.mark.slow
def test_torch_trains_data_parallel():
    pytest.importorskip("torch")
    x = np.random.default_rng(2).normal(size=(400, 4))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        with Communicator(client, timeout="60s") as comm:
            array = da.from_array(x, chunks=(100, 4))
            for _ in range(2):  # it starts again in the same processes
                one, two = client.gather(comm.run_torch(data_parallel, array, 10))
                assert one[0] == "gloo" and one[2] == two[2]
                assert one[1][-1] < one[1][0] and one[1] != two[1]
            futures = comm.run_torch(fails_after_a_while)
            errors = [future.exception() for future in futures]
    assert repr(errors[1]) == "ValueError('it is 7')" and errors[0] is not None
