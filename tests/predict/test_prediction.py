"""Predictions rank machines by time, with cost, range, and the resource that would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.predict import prediction
from dask_gpurt.predict.catalogue import Catalogue
from dask_gpurt.predict.prediction import Predictions, predict
from dask_gpurt.predict.recorded_program import recorded_program
from tests.predict.traces import MIB, ran, trace

#: One vCPU each, so that a machine is one worker of one thread.
MACHINES = """
fast: {threads: 1, memory: 8 GiB, network: 10 Gb/s, usd_per_hour: 3600}
slow: {threads: 1, memory: 8 GiB, network: 80 Mb/s, usd_per_hour: 1800}
small: {threads: 1, memory: 256 MiB, network: 10 Gb/s, disk: 64 MiB/s}
tiny: {threads: 1, memory: 8 MiB, network: 10 Gb/s}
"""


def traced(n: int = 8, nbytes: int = 64 * MIB):
    """Return a traced program: sources that one task reads, on one worker."""
    load = [ran(i, "load", 1.0 + i, 1.99 + i, ready_s=0.99, nbytes=nbytes) for i in range(n)]
    last = ran(n, "sum", 1.0 + n, 1.9 + n, *range(n), ready_s=0.995 + n)
    return recorded_program(trace(*load, last, hosts=("box",)), "test.json.gz")


def predictions(*wanted: str, speed: float = 1.0, **more) -> Predictions:
    recorded = traced(**more)
    catalogue = Catalogue(recorded.cluster, MACHINES, "test")
    return predict(recorded, wanted, catalogue, simulate, speed=speed)


def test_the_recorded_machines_are_simulated_first():
    seen: list[str] = []
    recorded = traced()
    found = predict(recorded, [], Catalogue(recorded.cluster), simulate, on_simulated=seen.append)
    assert found.rows == ()
    assert set(seen) == {"the machines of the trace"}
    assert found.measured_s == pytest.approx(8.912)
    assert abs(found.error) < 0.02


def test_machines_are_sorted_by_time_and_have_a_cost():
    found = predictions("fast", "4xslow", "4xfast")
    assert [row.group.name for row in found.rows] == ["4xfast", "1xfast", "4xslow"]
    best, one, _ = found.rows
    assert best.time_s < one.time_s
    assert best.usd == pytest.approx(4 * best.time_s)
    assert one.usd == pytest.approx(one.time_s)
    error = abs(found.error)
    assert best.low_s < best.time_s * (1 - error) < best.time_s * (1 + error) < best.high_s
    assert (best.n_workers, best.nthreads) == (4, 1)


def test_the_slow_resource_is_named():
    (slow,) = predictions("4xslow").rows
    assert slow.changes[0].name == "network"
    assert slow.changes[0].ratio < 0.65
    (alone,) = predictions("fast").rows
    assert [one.name for one in alone.changes] == ["speed"]
    assert alone.changes[0].ratio == pytest.approx(0.5, abs=0.02)


def test_a_large_program_is_simulated_once(monkeypatch):
    seen: list[str] = []
    recorded = traced()
    monkeypatch.setattr(prediction, "MANY", 8)
    predict(recorded, [], Catalogue(recorded.cluster), simulate, on_simulated=seen.append)
    assert len(seen) == 1


def test_a_worker_that_lacks_memory_is_no_choice():
    # The inputs of the last task fit into a worker, but not beside its output.
    recorded = traced(n=6, nbytes=40 * MIB)
    tasks = list(recorded.program.workload.tasks)
    last = next(i for i, one in enumerate(tasks) if len(one.dependencies) == 6)
    tasks[last] = replace(tasks[last], nbytes=64 * MIB)
    program = replace(
        recorded.program, workload=replace(recorded.program.workload, tasks=tuple(tasks))
    )
    larger = replace(recorded, program=program)
    catalogue = Catalogue(larger.cluster, MACHINES, "test")
    (row,) = predict(larger, ["small"], catalogue, simulate).rows
    assert not row.fits
    assert row.short_nbytes == (6 * 40 + 64 - 256) * MIB


def test_speed_is_for_other_machines_only():
    quick = {row.group.name: row for row in predictions("fast", "recorded", speed=2.0).rows}
    assert quick["1xrecorded"].time_s == pytest.approx(2 * quick["1xfast"].time_s, rel=0.02)


def test_a_small_machine_spills_and_is_said_to():
    (small,) = predictions("small", n=6, nbytes=40 * MIB).rows
    assert small.fits
    assert small.spilled_nbytes >= 2 * 40 * MIB
    assert {"memory", "disk"} & {one.name for one in small.changes}
    assert small.usd is None


def test_machines_that_do_not_fit_come_last():
    found = predictions("tiny", "small", "fast", n=6, nbytes=40 * MIB)
    assert [row.group.machine.name for row in found.rows] == ["fast", "small", "tiny"]
    assert not found.rows[-1].fits
    assert "do not fit into a worker" in found.rows[-1].problem


def test_the_same_trace_gives_the_same_predictions():
    first, second = (predictions("2xslow") for _ in range(2))
    assert first.rows[0].time_s == second.rows[0].time_s
    assert first.rows[0].changes == second.rows[0].changes
