"""Traces recorded on a live cluster contain all tasks and existing data."""

from __future__ import annotations

import dask.array as da
import pytest
from dask.utils import key_split
from distributed import Client, LocalCluster, wait

from dask_gpurt.errors import WorkloadError
from dask_gpurt.plugins.simulation.simulated_run import simulate
from dask_gpurt.plugins.simulation.workload_recorder import WorkloadRecorder, recorded
from dask_gpurt.simulate.example_clusters import pcie_gpus


@pytest.fixture(scope="module")
def client():
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False}
    with (
        LocalCluster(**options, dashboard_address=":0", silence_logs=50) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_recorded_computation_can_be_replayed(client):
    x = da.ones((60, 60), chunks=20)
    with recorded(client) as recording:
        future = client.compute((x + 1).sum(), optimize_graph=False)
        assert future.result() == 7200
        model = recording.workload("sum")
    names = [key_split(str(one.key)) for one in model.tasks]
    assert names.count("ones_like") == names.count("add") == 9
    (wanted,) = model.wanted
    assert not any(wanted in one.dependencies for one in model.tasks)
    for one, name in zip(model.tasks, names, strict=True):
        assert one.duration_s > 0
        if name == "add":
            assert one.nbytes == 20 * 20 * 8
            assert [names[needed] for needed in one.dependencies] == ["ones_like"]
    result = simulate(model, pcie_gpus(1, 2))
    assert len(result.tasks) == len(model.tasks)
    assert sum(result.busy_s.values()) == pytest.approx(sum(one.duration_s for one in model.tasks))


def test_existing_data_is_part_of_the_trace(client):
    # `ones` alone is a view of a single number, so it is added to.
    x = client.persist(da.ones((40, 40), chunks=20) + 1)
    with client.as_current():
        wait(x)
    with recorded(client) as recording:
        assert client.compute(x.sum()).result() == 3200
        model = recording.workload("sum of what was there")
    sources = [one for one in model.tasks if not one.dependencies]
    assert len(sources) == 4
    assert {one.duration_s for one in sources} == {0.0}
    assert {one.nbytes for one in sources} == {20 * 20 * 8}


def test_empty_recording_is_not_a_trace(client):
    with recorded(client) as recording, pytest.raises(WorkloadError, match="no task is wanted"):
        recording.workload("nothing")


def test_oversized_recording_is_an_error(client):
    client.register_plugin(WorkloadRecorder(max_tasks=3), name="small")
    try:
        client.compute(da.ones(10, chunks=2), optimize_graph=False).result()
        with pytest.raises(WorkloadError, match="more than 3"):
            client.run_on_scheduler(
                lambda dask_scheduler: dask_scheduler.plugins["small"].workload("x")
            )
    finally:
        client.unregister_scheduler_plugin("small")
