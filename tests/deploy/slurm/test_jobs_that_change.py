"""Jobs come, leave, are cancelled and reach their end while a program runs: it ends right.

Gates hold tasks until the test has seen the state that it waits for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import pytest
from distributed import Client, wait
from distributed.diagnostics.plugin import SchedulerPlugin

import dask_gpurt
from tests.deploy.slurm.job_cluster import SMALL_MEMORY, JobCluster, cluster_of_jobs
from tests.deploy.slurm.throwaway import Slurm
from tests.failure.gates import DEADLINE_S, Gate, pass_gate, until
from tests.failure.memory_stage import expected_sums, make_block, sums_of
from tests.failure.stage import N_INPUTS, expected, frame, make_input
from tests.integration.comparing import assert_same_partitions
from tests.thoroughness import only_if_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Enough that not all of them fit into the memory of two workers with 64 MiB.
N_BLOCKS = 60


def shuffle(client: Client, gates: dict[int, str]) -> list[Any]:
    """Start the shuffle of `stage`, and return futures of its outputs.

    Parameters
    ----------
    gates
        Gates at which input partitions wait, by their numbers.
    """
    import dask.dataframe as dd

    inputs = [
        dask.delayed(make_input, pure=False)(number, gates.get(number), {})
        for number in range(N_INPUTS)
    ]
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = dd.from_delayed(inputs, meta=frame(0).iloc[:0], verify_meta=False)
        return list(client.compute(lazy.shuffle("key", npartitions=N_INPUTS).to_delayed()))


def results(client: Client, futures: list[Any]) -> list[Any]:
    return [future.result(timeout=DEADLINE_S) for future in futures]


def workers(jobs: JobCluster) -> set[str]:
    return set(jobs.client.scheduler_info(n_workers=-1)["workers"])


def runs_on(jobs: JobCluster) -> set[str]:
    """Return the workers that take part in a shuffle, or did."""
    reports = dask_gpurt.status(jobs.client)["workers"]
    return {
        worker
        for worker, report in reports.items()
        if report and report["counters"]["shuffle_runs"]
    }


def spilling(jobs: JobCluster) -> list[str]:
    """Return the workers that have values on disk."""
    reports = dask_gpurt.status(jobs.client)["workers"]
    return [
        worker
        for worker, report in sorted(reports.items())
        for level in (report["memory"]["levels"] if report else ())
        if level["name"] == "disk" and level["used_nbytes"] > 0
    ]


def test_job_is_cancelled_in_mid_shuffle(slurm: Slurm) -> None:
    with cluster_of_jobs(slurm, 2) as jobs, Gate() as gate:
        outputs = shuffle(jobs.client, {N_INPUTS - 1: gate.path})
        gate.wait_for()
        until(lambda: len(runs_on(jobs)) == 2, "the shuffle does not reach both workers")
        victim, job = sorted(jobs.jobs().items())[0]
        slurm.ask("scancel", job)
        jobs.departures.wait_for(victim)
        gate.open()
        assert_same_partitions(results(jobs.client, outputs), expected())
        assert dask_gpurt.status(jobs.client)["runs"]["stock"] == 0
        slurm.wait_for_state(job, "CANCELLED")


def make_held_block(number: int, gate: str) -> Any:
    pass_gate(gate)
    return make_block(number)


def test_job_is_killed_in_mid_spill(slurm: Slurm) -> None:
    """SLURM kills all processes of the job at once, as it does at the end of its memory."""
    with cluster_of_jobs(slurm, 2, SMALL_MEMORY, memory="64MiB") as jobs, Gate() as gate:
        blocks = jobs.client.map(make_block, range(N_BLOCKS - 1))
        blocks.append(jobs.client.submit(make_held_block, N_BLOCKS - 1, gate.path))
        gate.wait_for()
        # The other worker may have nothing to do but wait at the gate.
        until(lambda: spilling(jobs), "no worker spills")
        victim = spilling(jobs)[0]
        job = jobs.jobs()[victim]
        slurm.ask("scancel", "--signal=KILL", "--full", job)
        jobs.departures.wait_for(victim)
        gate.open()
        assert sums_of(jobs.client, blocks) == expected_sums(N_BLOCKS)
        assert spilling(jobs) == list(workers(jobs))


def test_adaptive_jobs_join_during_a_shuffle_and_leave(slurm: Slurm) -> None:
    # Dask expects the waiting tasks to be as short as those that ran before. With a target that is
    # shorter, it wants a thread for each of them: three threads, of two workers.
    quickly = {"interval": "200ms", "target_duration": "10us", "wait_count": 2}
    # The fourth thread runs the other tasks.
    with cluster_of_jobs(slurm, 1, cores=2) as jobs, Gate() as gate:
        jobs.cluster.adapt(minimum_jobs=1, maximum_jobs=2, **quickly)
        outputs = shuffle(jobs.client, dict.fromkeys(range(3, N_INPUTS), gate.path))
        until(lambda: len(workers(jobs)) == 2, "no job is added")
        until(lambda: runs_on(jobs), "the shuffle does not begin")
        gate.open()
        assert_same_partitions(results(jobs.client, outputs), expected())
        until(lambda: len(workers(jobs)) == 1, "the job without work is not removed")
        # Values of the one that left moved to the one that stays.
        assert_same_partitions(results(jobs.client, outputs), expected())
        assert dask_gpurt.status(jobs.client)["runs"]["stock"] == 0


@only_if_all
def test_cluster_is_scaled_down_in_mid_shuffle(slurm: Slurm) -> None:
    with cluster_of_jobs(slurm, 2) as jobs, Gate() as gate:
        outputs = shuffle(jobs.client, {N_INPUTS - 1: gate.path})
        gate.wait_for()
        until(lambda: len(runs_on(jobs)) == 2, "the shuffle does not reach both workers")
        before = workers(jobs)
        jobs.cluster.scale(jobs=1)
        until(lambda: len(workers(jobs)) == 1, "no worker is retired")
        gate.open()
        assert_same_partitions(results(jobs.client, outputs), expected())
        assert workers(jobs) < before
        assert dask_gpurt.status(jobs.client)["runs"]["stock"] == 0


class Computations(SchedulerPlugin):
    """A scheduler plugin that counts how often each key was computed."""

    name = "computations"

    def __init__(self) -> None:
        self.counts: Counter[Any] = Counter()

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if (start, finish) == ("processing", "memory"):
            self.counts[key] += 1


def test_job_that_nears_its_end_hands_its_values_on(slurm: Slurm) -> None:
    """Workers on node n1 retire before their job's end. Nothing is lost or computed twice."""
    lifetime = 'LIFETIME=$([ "$SLURMD_NODENAME" = n1 ] && echo 10s || echo 1h)'
    options = {"worker_extra_args": ["--lifetime", "$LIFETIME"], "walltime": "00:01:00"}
    computed = Computations()
    with cluster_of_jobs(slurm, 2, [lifetime], **options) as jobs:
        # A job that ended is replaced.
        jobs.cluster.adapt(minimum_jobs=2, maximum_jobs=2, interval="200ms")
        jobs.cluster.scheduler.add_plugin(computed)
        values: list[Any] = []
        leaving: set[str] = set()

        def hold_values() -> bool:
            """Make values on the worker that will leave, and on any; False if it left meanwhile."""
            nodes = jobs.environ("SLURMD_NODENAME")
            on_n1 = [one for one, node in nodes.items() if node == "n1"]
            first = len(values)
            options = {"workers": on_n1, "allow_other_workers": True} if on_n1 else {}
            values.extend(jobs.client.map(make_block, range(first, first + 8), **options))
            values.extend(shuffle(jobs.client, {}))
            with jobs.client.as_current():
                wait(values[first : first + 8])
            has = jobs.client.has_what()
            leaving.update(one for one in on_n1 if has.get(one))
            results(jobs.client, values)
            return bool(leaving)

        until(hold_values, "no worker on n1 has values")
        victim = leaving.pop()
        job = jobs.jobs()[victim]
        before = computed.counts.copy()
        jobs.departures.wait_for(victim)
        slurm.wait_for_state(job, "COMPLETED")
        found = results(jobs.client, values)
        for first in range(0, len(values), 8 + N_INPUTS):
            made = found[first : first + 8]
            assert [block.tolist() for block in made] == [
                make_block(number).tolist() for number in range(first, first + 8)
            ]
            assert_same_partitions(found[first + 8 : first + 8 + N_INPUTS], expected())
        assert computed.counts == before
