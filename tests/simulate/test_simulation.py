"""Simulations with distributed's scheduler give results computed by hand, also with failures."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace

import dask
import pytest
from distributed import scheduler as distributed_scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from dask_gpurt.errors import SimulationError
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import ChangesSpeed, Dies
from dask_gpurt.simulate.workload import Workload
from tests.simulate.flat import BANDWIDTH, CONTROL_S, LATENCY_S, address, flat, task, workload

MIB = 2**20


def chain(length: int, s: float = 0.5) -> Workload:
    return workload(task("link-0", s=s), *(task(f"link-{n}", n - 1, s=s) for n in range(1, length)))


def spread(count: int, *, s: float = 0.25, nbytes: int = MIB) -> Workload:
    """Return a workload of sources, each with one wanted task that uses it."""
    sources = [task(f"('load-0', {n})", s=s, nbytes=nbytes, source=True) for n in range(count)]
    users = [task(f"('use-0', {n})", n, s=s) for n in range(count)]
    return workload(*sources, *users, wanted=range(count, 2 * count))


def reduction(count: int, *, s: float = 0.25, nbytes: int = 16 * MIB) -> Workload:
    """Return a workload of sources, tasks on pairs of distant sources, and a final sum."""
    sources = [task(f"('load-0', {n})", s=s, nbytes=nbytes, source=True) for n in range(count)]
    pairs = [task(f"('pair-0', {n})", n, (n * 7 + 3) % count, s=s) for n in range(count)]
    return workload(*sources, *pairs, task("end-0", *range(count, 2 * count), s=s))


def test_chain_takes_its_durations_and_two_messages_per_task():
    result = simulate(chain(4), flat(1), validate=True)
    assert result.makespan_s == 4 * (0.5 + 2 * CONTROL_S) + CONTROL_S
    assert [run.key for run in result.tasks] == ["link-0", "link-1", "link-2", "link-3"]
    assert result.busy_s == {address(0): 2.0}
    assert result.transfers == ()


def test_each_worker_starts_once_before_its_first_task():
    cluster = flat(2)
    cold = replace(
        cluster, workers=tuple(replace(one, startup_s=3.0, speed=2.0) for one in cluster.workers)
    )
    result = simulate(spread(4), cold, validate=True)
    first = [min(run.stop_s for run in result.tasks if run.worker == address(n)) for n in range(2)]
    assert min(first) == 1.5 + 0.125 + CONTROL_S
    # Both start at the same time, and only once.
    assert result.makespan_s < 1.5 + 4 * 0.125 + 20 * CONTROL_S


def test_fan_out_takes_the_rounds_that_workers_need():
    # No worker has a source in advance, so each round of four threads waits for messages.
    with dask.config.set({"distributed.scheduler.worker-saturation": 1.0}):
        result = simulate(spread(8), flat(2, nthreads=2), validate=True)
    assert result.makespan_s == 4 * (0.25 + 2 * CONTROL_S) + CONTROL_S
    assert sum(result.busy_s.values()) == 16 * 0.25
    assert set(result.busy_s) == {address(0), address(1)}
    assert result.transfers == ()  # each result is used on its own worker


def test_transfer_takes_request_bytes_and_response():
    nbytes = 2**28
    two = workload(
        task("left-0", s=1.0, nbytes=nbytes),
        task("right-0", s=1.0, nbytes=nbytes),
        task("both-0", 0, 1, s=0.5),
    )
    result = simulate(two, flat(2), validate=True)
    fetch_s = LATENCY_S + nbytes / BANDWIDTH + LATENCY_S
    assert result.makespan_s == (
        (CONTROL_S + 1.0 + CONTROL_S) + (CONTROL_S + fetch_s + 0.5 + CONTROL_S) + CONTROL_S
    )
    (moved,) = result.transfers
    assert moved.stop_s - moved.start_s == fetch_s
    assert result.moved_nbytes == nbytes
    assert result.link_nbytes == {f"in {moved.target}": nbytes, f"out {moved.source}": nbytes}
    assert result.peak_nbytes == {moved.source: nbytes, moved.target: 2 * nbytes}


def test_two_receivers_share_the_link_of_the_sender():
    nbytes = 2**28
    models = [
        task("source-0", s=1.0, nbytes=nbytes),
        *(task(f"near-{n}", s=1.0, nbytes=2 * nbytes) for n in range(2)),
        *(task(f"use-{n}", 0, 1 + n, s=1.0) for n in range(2)),
    ]
    result = simulate(workload(*models, wanted=(3, 4)), flat(3), validate=True)
    # Both users run beside their larger input, and the link out of the third worker is halved.
    assert [moved.nbytes for moved in result.transfers] == [nbytes, nbytes]
    for moved in result.transfers:
        assert moved.stop_s - moved.start_s == 2 * LATENCY_S + 2 * nbytes / BANDWIDTH


def test_simulation_is_deterministic():
    one = simulate(reduction(60), flat(5, speeds=[0.5]))
    other = simulate(reduction(60), flat(5, speeds=[0.5]))
    assert one == other
    assert one.transfers
    assert simulate(reduction(60), flat(5)) != one


def test_validation_changes_nothing():
    assert simulate(reduction(30), flat(3), validate=True) == simulate(reduction(30), flat(3))


DIGEST = """
import asyncio, hashlib
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.examples import EXAMPLES, Scale, joins
from dask_gpurt.simulate.example_clusters import nvlink_hosts, pcie_gpus
scale = Scale(side=4, block_nbytes=100_000_000, load_rate=2e9, rate=50e9)
def placed(scheduler):
    Placement(scheduler, "data-aware", clock=asyncio.get_running_loop().time)
def digest(workload, cluster, install=None):
    result = simulate(workload, cluster, install)
    seen = (result.makespan_s, result.tasks, result.transfers, result.link_nbytes, result.steals)
    print(workload.name, hashlib.sha256(repr(seen).encode()).hexdigest())
for example in EXAMPLES:
    digest(example(scale), pcie_gpus(2, 3))
# More idle workers on a host than are looked at.
scale = Scale(side=6, block_nbytes=500_000_000, load_rate=5e9, rate=100e9)
digest(joins(scale), nvlink_hosts(4, 8), placed)
"""


def test_simulation_does_not_depend_on_hash_seeds():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DIGEST],
            env={"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "17")
    ]
    one, other = (process.communicate()[0] for process in processes)
    assert one.count("\n") == 9
    assert one == other


def test_a_trace_replays_to_the_same_result():
    model = reduction(30)
    replayed = Workload.from_json(model.to_json())
    assert simulate(replayed, flat(3)) == simulate(model, flat(3))


def test_slow_worker_gets_fewer_tasks():
    healthy = simulate(spread(60), flat(4))
    slow = simulate(spread(60), flat(4, speeds=[0.2]))
    assert {run.key for run in slow.tasks} == {run.key for run in healthy.tasks}
    done = [sum(run.worker == address(n) for run in slow.tasks) for n in range(4)]
    assert done[0] < min(done[1:])
    assert slow.makespan_s < 2 * healthy.makespan_s


def test_slowed_worker_takes_longer_from_then_on():
    # Half of the only task is done at full speed, and the other half at an eighth of it.
    cluster = flat(1).with_incidents(ChangesSpeed(address(0), at_s=CONTROL_S + 0.5, speed=0.125))
    result = simulate(chain(1, s=1.0), cluster)
    assert result.makespan_s == CONTROL_S + 0.5 + 0.5 / 0.125 + CONTROL_S + CONTROL_S


@pytest.mark.parametrize("at_s", [0.1, 0.6, 0.9])
def test_tasks_of_a_dead_worker_are_repeated(at_s):
    # The last death happens during transfers.
    cluster = flat(3).with_incidents(Dies(address(1), at_s))
    model = reduction(24)
    result = simulate(model, cluster, validate=True)
    assert {run.key for run in result.tasks} == {str(one.key) for one in model.tasks}
    assert all(run.stop_s < at_s for run in result.tasks if run.worker == address(1))
    assert not any(
        moved.stop_s > at_s
        for moved in result.transfers
        if address(1) in (moved.source, moved.target)
    )
    assert result.makespan_s > simulate(model, flat(3)).makespan_s
    assert result == simulate(model, cluster)


def test_sender_has_bandwidth_again_after_its_receiver_died():
    nbytes = 2**28
    model = workload(
        task("source-0", s=1.0, nbytes=nbytes),
        *(task(f"near-{n}", s=1.0, nbytes=2 * nbytes) for n in range(2)),
        *(task(f"use-{n}", 0, 1 + n, s=1.0) for n in range(2)),
        wanted=(3, 4),
    )
    with dask.config.set({"distributed.worker.connections.outgoing": 1}):
        healthy = simulate(model, flat(3), validate=True)
        one, other = healthy.transfers
        # The second transfer was refused, and repeated after the end of the first one.
        assert one.source == other.source
        assert other.stop_s > one.stop_s
        dies = Dies(one.target, at_s=(one.start_s + one.stop_s) / 2)
        result = simulate(model, flat(3).with_incidents(dies), validate=True)
    assert result.transfers[0].target == other.target
    assert {run.key for run in result.tasks} == {run.key for run in healthy.tasks}


def test_simulation_ends_without_workers():
    cluster = flat(1).with_incidents(Dies(address(0), 0.1))
    with pytest.raises(SimulationError, match="is not done"):
        simulate(chain(2), cluster)


@pytest.mark.parametrize("held", [{"no task": address(0)}, {"chain-0": address(7)}])
def test_held_results_name_a_task_and_a_worker(held):
    model = workload(task("chain-0"), task("chain-1", 0))
    with pytest.raises(SimulationError, match="there is no such task or worker"):
        simulate(model, flat(1), held=held)


def test_root_tasks_queue_by_worker_saturation():
    class Watch(SchedulerPlugin):
        most = 0

        def __init__(self, scheduler):
            self.scheduler = scheduler

        def transition(self, key, start, finish, *args, **kwargs):
            for worker in self.scheduler.workers.values():
                self.most = max(self.most, len(worker.processing))

    def most(saturation: float) -> int:
        with dask.config.set({"distributed.scheduler.worker-saturation": saturation}):
            seen = []

            def install(scheduler):
                scheduler.add_plugin(Watch(scheduler), name="watch")
                seen.append(scheduler.plugins["watch"])

            simulate(spread(40), flat(2, nthreads=2), install)
            return seen[0].most

    assert most(1.0) == 2
    assert most(1.5) == 3
    assert most(float("inf")) >= 20


def test_work_is_stolen_in_virtual_time():
    # Tasks go to their inputs, and one worker has most of these.
    model = workload(
        task("source-0", s=0.25, nbytes=1000),
        *(task(f"first-{n}", 0, s=0.25, nbytes=1000) for n in range(4)),
        *(task(f"('use-0', {n})", 0, 1 + n % 4, s=2.0) for n in range(16)),
        wanted=range(5, 21),
    )
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        kept = simulate(model, flat(4))
    shared = simulate(model, flat(4), validate=True)
    assert kept.steals == 0 < shared.steals
    assert shared.makespan_s < kept.makespan_s
    assert len({run.worker for run in shared.tasks}) == 4


def test_every_task_takes_some_time():
    """distributed's work stealing asserts that durations are positive."""
    result = simulate(workload(task("none-0", s=0.0), task("none-1", 0, s=0.0)), flat(2))
    assert all(run.stop_s > run.start_s for run in result.tasks)


def test_plugins_live_in_virtual_time():
    seen = []

    async def install(scheduler):
        began = distributed_scheduler.time()
        await asyncio.sleep(3600)
        seen.append(distributed_scheduler.time() - began)
        callback = PeriodicCallback(lambda: seen.append(distributed_scheduler.time()), 250)
        callback.start()
        scheduler.periodic_callbacks["test"] = callback

    began_s = time.monotonic()
    result = simulate(chain(4), flat(1), install)
    assert time.monotonic() - began_s < 60
    assert seen[0] == 3600
    assert len(seen[1:]) == 8  # one for every 0.25 s of the chain's two seconds
    # Time before the submission of the graph does not count.
    assert result.makespan_s == pytest.approx(simulate(chain(4), flat(1)).makespan_s, abs=1e-9)


def test_error_of_a_policy_ends_the_simulation():
    def install(scheduler):
        asyncio.get_running_loop().call_later(0.5, lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        simulate(chain(4), flat(1), install)


def test_simulations_do_not_mix():
    def install(scheduler):
        simulate(chain(1), flat(1))

    with pytest.raises(SimulationError, match="one simulation at a time"):
        simulate(chain(1), flat(1), install)
    assert distributed_scheduler.time is time.time
    assert simulate(chain(1), flat(1)).tasks


def test_simulation_opens_no_socket_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: pytest.fail("a socket"))
    clock = distributed_scheduler.time
    paths = list(sys.path)
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        simulate(reduction(12), flat(3))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    # A cluster of an earlier test may be closing, and remove its own directory from the path.
    assert set(sys.path) <= set(paths)
    assert distributed_scheduler.time is clock is time.time


def test_code_outside_of_a_simulation_sees_the_real_clock():
    real = []

    def install(scheduler):
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        real.append(distributed_scheduler.time())
        asyncio._set_running_loop(loop)
        real.append(distributed_scheduler.time())

    before = time.time()
    simulate(chain(1), flat(1), install)
    assert before <= real[0] <= time.time()
    assert real[1] == 1.0


def test_plugins_may_wrap_handlers():
    seen = []

    def install(scheduler):
        stock = scheduler.handlers["heartbeat_worker"]

        def heartbeat(*, address, **content):
            seen.append(address)
            return stock(address=address, **content)

        scheduler.handlers["heartbeat_worker"] = heartbeat

    simulate(chain(4), flat(2), install)
    assert set(seen) == {address(0), address(1)}


def test_heartbeats_report_link_rates():
    measured = {}

    def install(scheduler):
        measured.update(scheduler=scheduler)

    # Long enough for a heartbeat after the transfers.
    simulate(reduction(40, nbytes=64 * MIB), flat(4), install)
    rates = measured["scheduler"].bandwidth_workers
    assert len(rates) == 12
    # distributed sums the transfers of one heartbeat, so rates have no upper limit.
    assert all(rate > BANDWIDTH / 16 for rate in rates.values())


def test_a_timeline_has_tasks_and_transfers_in_order():
    result = simulate(reduction(12), flat(3))
    rows = result.timeline()
    assert len(rows) == len(result.tasks) + len(result.transfers)
    assert rows == sorted(rows)
    assert json.dumps(rows)


@pytest.mark.parametrize("validate", [False, True])
def test_held_results_are_fetched_but_not_made(validate):
    sources = [task(f"('load-0', {n})", s=8.0, nbytes=MIB, source=True) for n in range(2)]
    model = workload(*sources, task("join", 0, 1))
    held = {sources[n].key: address(n) for n in range(2)}
    result = simulate(model, flat(3), held=held, validate=validate)
    (run,) = result.tasks
    (moved,) = result.transfers
    assert run.key == "join"
    assert {moved.source, moved.target} == set(held.values())
    assert (moved.target, moved.nbytes) == (run.worker, MIB)
    assert result.peak_nbytes == {address(0): MIB, address(1): MIB, address(2): 0} | {
        run.worker: 2 * MIB
    }
