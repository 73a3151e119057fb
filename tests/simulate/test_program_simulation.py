"""Simulations of programs with shuffles, limited memory and several graphs, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpurt.errors import SimulationError, TooLargeError
from dask_gpurt.plugins.simulation import simulated_exchange
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.simulate.cluster_model import Dies
from dask_gpurt.simulate.program import ExchangeModel, ProgramModel, Submission
from tests.simulate.flat import BANDWIDTH, CONTROL_S, LATENCY_S, address, flat, task, workload

MIB = 2**20


def shuffled(n: int, nbytes: int, *, s: float = 0.5) -> ProgramModel:
    """Return a shuffle of `n` inputs and as many outputs, all of which are wanted."""
    transfers = [task(f"('shuffle-transfer-0', {i})", s=s, source=True) for i in range(n)]
    barrier = task("shuffle-barrier-0", *range(n), s=0)
    outputs = [task(f"('p2pshuffle-0', {i})", n, s=s, nbytes=nbytes // n) for i in range(n)]
    model = workload(*transfers, barrier, *outputs, wanted=range(n + 1, 2 * n + 1))
    everything = Submission(tuple(range(2 * n + 1)), model.wanted)
    exchange = ExchangeModel(tuple(range(n)), n, tuple(range(n + 1, 2 * n + 1)), nbytes)
    return ProgramModel(model, (everything,), (exchange,))


def test_the_barrier_waits_for_the_parts_of_a_shuffle():
    nbytes = 64 * MIB
    result = simulate(shuffled(2, nbytes), flat(2), validate=True)
    # Each transfer sends half of its part to the other worker. Both links are free.
    travel_s = nbytes / 4 / BANDWIDTH + LATENCY_S
    barrier = next(run for run in result.tasks if "barrier" in run.key)
    arrived = max(one.stop_s for one in result.transfers if one.nbytes)
    assert arrived == max(run.stop_s for run in result.tasks if "transfer" in run.key) + travel_s
    assert barrier.stop_s >= arrived
    assert result.moved_nbytes == nbytes / 2
    assert result.link_nbytes == {
        f"{way} {address(n)}": nbytes / 4 for way in ("in", "out") for n in range(2)
    }


def test_outputs_run_on_the_workers_that_own_them():
    result = simulate(shuffled(8, 64 * MIB), flat(4), validate=True)
    ran_on = {run.key: run.worker for run in result.tasks if "p2pshuffle" in run.key}
    assert ran_on == {f"('p2pshuffle-0', {i})": address(i // 2) for i in range(8)}


def test_larger_outputs_receive_more():
    program = shuffled(2, 64 * MIB)
    tasks = list(program.workload.tasks)
    tasks[3] = replace(tasks[3], nbytes=48 * MIB)
    tasks[4] = replace(tasks[4], nbytes=16 * MIB)
    skewed = replace(program, workload=replace(program.workload, tasks=tuple(tasks)))
    result = simulate(skewed, flat(2), validate=True)
    sent = {one.target: one.nbytes for one in result.transfers if one.nbytes}
    assert sent == {address(0): 24 * MIB, address(1): 8 * MIB}


def test_a_transfer_waits_while_its_worker_has_too_much_to_send(monkeypatch):
    free = simulate(shuffled(8, 64 * MIB), flat(2))
    for name in ("MAX_WAITING_NBYTES", "MAX_WAITING_SHARE"):
        monkeypatch.setattr(simulated_exchange, name, 0)
    held_back = simulate(shuffled(8, 64 * MIB), flat(2))
    assert held_back.makespan_s > free.makespan_s
    waited = [run.stop_s - run.start_s for run in held_back.tasks if "transfer" in run.key]
    assert min(waited) == 0.5 + 4 * MIB / BANDWIDTH + LATENCY_S


def test_workers_cannot_die_in_a_program_with_shuffles():
    cluster = flat(2).with_incidents(Dies(address(0), at_s=1.0))
    with pytest.raises(SimulationError, match="no worker can fail"):
        simulate(shuffled(2, MIB), cluster)


def test_a_second_graph_waits_for_the_first_and_for_the_client():
    model = workload(task("a-0", s=0.5, nbytes=MIB), task("b-0", 0, s=0.25), wanted=(0, 1))
    program = ProgramModel(model, (Submission((0,), (0,)), Submission((1,), (1,), (0,), 2.0)))
    result = simulate(program, flat(1), validate=True)
    first, second = result.tasks
    assert second.start_s - first.stop_s == pytest.approx(2.0 + 3 * CONTROL_S)
    assert result.makespan_s == pytest.approx(0.5 + 2.0 + 0.25 + 6 * CONTROL_S)


def test_graphs_that_wait_for_nothing_run_at_once():
    model = workload(task("a-0", s=0.5), task("b-0", s=0.5), wanted=(0, 1))
    program = ProgramModel(model, (Submission((0,), (0,)), Submission((1,), (1,))))
    result = simulate(program, flat(2), validate=True)
    assert result.makespan_s == 0.5 + 3 * CONTROL_S


def test_a_graph_does_not_overtake_the_one_that_it_needs():
    # The second is submitted 2 s after the first begins, and the third at once after the first.
    model = workload(
        task("a-0", s=0.5), task("b-0", s=0.5), task("c-0", 1, s=0.5), wanted=(0, 1, 2)
    )
    program = ProgramModel(
        model,
        (
            Submission((0,), (0,)),
            Submission((1,), (1,), (), 2.0),
            Submission((2,), (2,), (0,)),
        ),
    )
    result = simulate(program, flat(2), validate=True)
    assert [run.key for run in result.tasks] == ["a-0", "b-0", "c-0"]


def test_a_client_may_pause_for_long():
    model = workload(task("a-0", s=0.5), task("b-0", s=0.5), wanted=(0, 1))
    program = ProgramModel(model, (Submission((0,), (0,)), Submission((1,), (1,), (0,), 5000.0)))
    assert simulate(program, flat(1)).makespan_s == pytest.approx(5001.0, abs=0.01)


def chunks(n: int, nbytes: int) -> ProgramModel:
    """Return chunks that are all made before any of them is read."""
    made = [task(f"('make-0', {i})", s=1, nbytes=nbytes, source=True) for i in range(n)]
    every = task("all-0", *range(n), s=1)
    return ProgramModel.of(workload(*made, every))


def test_memory_is_only_counted_without_a_disk():
    result = simulate(chunks(8, 64 * MIB), flat(1))
    assert result.spilled_nbytes == result.needed_nbytes == {}
    assert result.peak_nbytes == {address(0): 512 * MIB}


def small(limit_nbytes: int, disk_nbytes_per_s: float):
    cluster = flat(1)
    workers = tuple(replace(one, memory_nbytes=limit_nbytes) for one in cluster.workers)
    return replace(cluster, workers=workers, disk_nbytes_per_s=disk_nbytes_per_s)


def test_results_beyond_the_target_go_to_disk_and_come_back():
    plenty = simulate(chunks(8, 64 * MIB), small(2**40, 64.0 * MIB), validate=True)
    assert plenty.spilled_nbytes == {address(0): 0}
    tight = simulate(chunks(8, 64 * MIB), small(512 * MIB, 64.0 * MIB), validate=True)
    spilled = tight.spilled_nbytes[address(0)]
    # 0.6 of 512 MiB hold four chunks beside the output of a running task.
    assert spilled == 4 * 64 * MIB
    # The last write is under way when the reading begins, and both share the disk.
    read_s = tight.makespan_s - plenty.makespan_s
    assert read_s == pytest.approx(spilled / (64 * MIB), abs=1.1)


def test_inputs_larger_than_a_worker_are_an_error(caplog):
    with pytest.raises(TooLargeError, match=r"512\.00 MiB worth of input"):
        simulate(chunks(8, 64 * MIB), small(256 * MIB, 1024.0 * MIB))
    assert not caplog.records


def test_a_worker_that_is_too_small_is_said_to_need_more():
    result = simulate(chunks(8, 64 * MIB), small(520 * MIB, 1024.0 * MIB), validate=True)
    assert result.needed_nbytes[address(0)] == 512 * MIB
    model = chunks(8, 64 * MIB).workload
    tasks = (*model.tasks[:-1], replace(model.tasks[-1], nbytes=64 * MIB))
    larger = ProgramModel.of(replace(model, tasks=tasks))
    result = simulate(larger, small(520 * MIB, 1024.0 * MIB), validate=True)
    assert result.needed_nbytes[address(0)] == 576 * MIB


def test_shards_that_have_no_room_go_to_disk():
    cluster = flat(2)
    workers = tuple(replace(one, memory_nbytes=64 * MIB) for one in cluster.workers)
    tight = replace(cluster, workers=workers, disk_nbytes_per_s=1024.0 * MIB)
    result = simulate(shuffled(8, 64 * MIB), tight, validate=True)
    # Each worker receives 32 MiB, and has room for 0.3 of 64 MiB. Its outputs fit.
    for worker in range(2):
        assert result.spilled_nbytes[address(worker)] == pytest.approx((32 - 0.3 * 64) * MIB, abs=9)


def test_senders_begin_with_different_owners():
    # With addresses in the order of their texts, hosts 10 and 11 would begin with host 0.
    result = simulate(shuffled(12, 12 * 12 * MIB), flat(12))
    first = {}
    for one in sorted((one for one in result.transfers if one.nbytes), key=lambda one: one.stop_s):
        first.setdefault(one.source, []).append(one.target)
    starts = {source: targets[:4] for source, targets in first.items()}
    assert starts[address(0)][0] == address(1)
    assert starts[address(10)][0] == address(11)
    assert starts[address(11)][0] == address(0)
