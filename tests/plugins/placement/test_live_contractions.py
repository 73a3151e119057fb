"""Products in real graphs are recognised, and grids of hosts save transfers."""

from __future__ import annotations

import asyncio
from ast import literal_eval
from dataclasses import replace

import dask
import dask.array as da
import pytest

from dask_gpurt.plugins.placement import live_contractions
from dask_gpurt.plugins.placement.live_contractions import Contractions
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import Dies, cluster_of_topology
from dask_gpurt.simulate.example_clusters import gpu_hosts
from dask_gpurt.simulate.examples import EXAMPLES, Scale, matmul
from dask_gpurt.simulate.graphs import TaskCost, workload_of

MB = 1_000_000
SCALE = Scale(side=8, block_nbytes=2 * MB, load_rate=0.3e9, rate=1e9)
LOAD, WORK = TaskCost(of="nothing", nbytes=2 * MB, rate=0.3e9), TaskCost(rate=1e9)


def boxes(n_hosts, per_host=2, **options):
    topology = gpu_hosts(n_hosts, per_host, nic_bandwidth=12.5e6, nvlink=False, **options)
    return cluster_of_topology("boxes", topology)


def ours(scheduler):
    Placement(scheduler, "data-aware", clock=asyncio.get_running_loop().time)


def told(machine):
    def install(scheduler):
        clock = asyncio.get_running_loop().time
        Placement(scheduler, "data-aware", machine.network.topology, clock=clock)

    return install


def crossing(result):
    """Return the transfers between hosts."""
    return [
        run
        for run in result.transfers
        if run.source.rpartition(":")[0] != run.target.rpartition(":")[0]
    ]


def crossing_nbytes(result):
    return sum(run.nbytes for run in crossing(result))


@pytest.fixture
def asked(monkeypatch):
    """Record questions about products and operands; return those with a host for an answer."""
    answers = []

    def noting(stock, host_of):
        def answer(self, ts):
            found = stock(self, ts)
            if (host := host_of(found)) is not None:
                answers.append((ts.key, host))
            return found

        return answer

    for name, host_of in (("host_of", lambda host: host), ("host_of_root", lambda found: found[1])):
        monkeypatch.setattr(Contractions, name, noting(getattr(Contractions, name), host_of))
    return answers


def test_two_hosts_exchange_only_one_operand():
    """The least is to send 16 blocks once. Two workers of a host may fetch a block at once."""
    machine = boxes(2)
    stock, found = simulate(matmul(SCALE), machine), simulate(matmul(SCALE), machine, told(machine))
    assert 16 <= crossing_nbytes(found) / (2 * MB) <= 24 < crossing_nbytes(stock) / (2 * MB)
    assert found.makespan_s < 0.5 * stock.makespan_s


def test_four_hosts_send_each_operand_about_once():
    machine = boxes(4)
    stock, found = simulate(matmul(SCALE), machine), simulate(matmul(SCALE), machine, told(machine))
    assert 32 <= crossing_nbytes(found) / (2 * MB) <= 40 < crossing_nbytes(stock) / (2 * MB)
    assert found.makespan_s < 0.6 * stock.makespan_s


GRAPHS = {
    "matmul": (lambda x, y: x @ y, 64),
    "tensordot": (lambda x, y: da.tensordot(x, y, axes=((0,), (1,))), 64),
    "einsum": (lambda x, y: da.einsum("ij,kj->ik", x, y), 64),
    "dot of a transpose": (lambda x, y: da.dot(x, x.T), 64),
    "then add": (lambda x, y: (x @ y) + 1, 64),
    "then sum": (lambda x, y: (x @ y).sum(), 64),
    # In a square, both operands are the same, so they cannot be told apart.
    "square": (lambda x, y: x @ x, 0),
    "too few outputs": (lambda x, y: x @ y[:, :10], 0),
    "add": (lambda x, y: x + y.T, 0),
    "anomaly": (lambda x, y: (x - x.mean(axis=0)) / x.std(axis=0), 0),
    "rechunk": (lambda x, y: x.rechunk((10, -1)), 0),
    "merge": (lambda x, y: x.to_dask_dataframe().merge(y.to_dask_dataframe(), on=0), 0),
}


@pytest.mark.parametrize(("make", "products"), GRAPHS.values(), ids=GRAPHS)
def test_contractions_are_distinguished_from_other_graphs(asked, make, products):
    x, y = (da.ones((40, 40), chunks=10), da.zeros((40, 40), chunks=10))
    costs = {"ones_like": LOAD, "zeros_like": LOAD, "": WORK}
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        simulate(workload_of("graph", make(x, y), costs), boxes(2), ours)
    found = [key for key, _ in asked if "ones_like" not in key and "zeros_like" not in key]
    assert len(set(found)) == products


def test_all_products_of_an_output_follow_the_first(asked, monkeypatch):
    monkeypatch.setattr(live_contractions, "MAX_TASKS", 8)
    machine = boxes(2)
    found = simulate(matmul(SCALE), machine, told(machine))
    assert crossing_nbytes(found) / (2 * MB) <= 24
    hosts = {}
    for key, host in asked:
        if "like" not in key:
            _, i, _, j = literal_eval(key)
            hosts.setdefault((i, j), set()).add(host)
    assert len(hosts) == 16
    assert all(len(some) == 1 for some in hosts.values())


@pytest.mark.parametrize("make", [one for one in EXAMPLES if one is not matmul])
def test_no_other_example_is_a_contraction(asked, make):
    simulate(make(SCALE), boxes(2), ours)
    assert not asked


@pytest.mark.parametrize("machine", [boxes(1, 4), boxes(4, slow_nics={3: 1e6})])
def test_unequal_or_single_hosts_get_no_grid(asked, machine):
    simulate(matmul(SCALE), machine, told(machine))
    assert not asked


@pytest.mark.parametrize(
    ("side", "n_hosts"),
    # 7 rows of outputs cannot be divided evenly among 3 hosts. 4 times 4 outputs are fewer than 20
    # hosts; the 64 products do not count.
    [(14, 3), (8, 20)],
)
def test_outputs_too_few_for_the_hosts_get_no_grid(asked, side, n_hosts):
    machine = boxes(n_hosts, 1)
    simulate(matmul(replace(SCALE, side=side)), machine, told(machine))
    assert not asked


def test_operands_without_a_grid_are_spread_as_by_stock_dask(asked):
    machine = gpu_hosts(16, 8, nic_bandwidth=12e9, nvlink=True)
    model = matmul(replace(SCALE, side=10))
    placed = []
    for install in (None, told(cluster_of_topology("boxes", machine))):
        run = simulate(model, cluster_of_topology("boxes", machine), install)
        placed.append({one.key: one.worker for one in run.tasks if "like" in one.key})
    assert not asked
    assert placed[0] == placed[1]


def test_outputs_as_many_as_hosts_get_a_grid(asked):
    machine = boxes(16, 1)
    stock, found = simulate(matmul(SCALE), machine), simulate(matmul(SCALE), machine, told(machine))
    assert len({host for _, host in asked}) == 16
    assert found.makespan_s < 0.6 * stock.makespan_s


def test_grid_is_renewed_when_a_host_is_gone(asked):
    machine = boxes(2, 1)
    healthy = simulate(matmul(SCALE), machine, told(machine))
    lost = machine.workers[0].address
    broken = machine.with_incidents(Dies(lost, healthy.makespan_s / 2))
    placed = []

    def install(scheduler):
        clock = asyncio.get_running_loop().time
        topology = machine.network.topology
        placed.append(Placement(scheduler, "data-aware", topology, clock=clock))

    found = simulate(matmul(SCALE), broken, install)
    assert {run.worker for run in found.tasks if run.start_s > healthy.makespan_s / 2} == {
        machine.workers[1].address
    }
    assert found.makespan_s < 2.5 * healthy.makespan_s
    assert placed[0].summary()["failed"] == 0
