"""Garbage collections skip long-lived objects while the runtime is on, and only then."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
from distributed import Client, LocalCluster

import dask_gpurt
from dask_gpurt.plugins.memory.gc_freeze import GcFreeze

OWN_PROCESS = SimpleNamespace(nanny="tcp://192.0.2.1:1", data={})


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    """Unfreeze the objects that `tests/conftest.py` froze, and freeze them again afterwards."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def is_collected(reference):
    gc.collect()
    return reference() is None


def test_only_existing_objects_are_frozen():
    before = Cycle()
    old = weakref.ref(before)
    frozen = GcFreeze(OWN_PROCESS)
    new = weakref.ref(Cycle())
    del before
    assert is_collected(new)
    assert not is_collected(old)
    frozen.close()
    assert is_collected(old)


def test_existing_garbage_is_collected_before_the_freeze():
    old = weakref.ref(Cycle())
    GcFreeze(OWN_PROCESS)
    assert old() is None


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(SimpleNamespace(nanny=None, data={}), id="a process of the user's"),
        pytest.param(SimpleNamespace(nanny="tcp://192.0.2.1:1", data={"x": 1}), id="values"),
    ],
)
def test_user_objects_are_not_frozen(worker):
    GcFreeze(worker).close()
    assert not gc.get_freeze_count()


def test_objects_frozen_by_others_stay_frozen():
    gc.freeze()
    GcFreeze(OWN_PROCESS).close()
    assert gc.get_freeze_count()


@pytest.mark.cluster
def test_worker_objects_are_frozen_until_disable():
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        LocalCluster(silence_logs=50, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert set(client.run(gc.get_freeze_count).values()) == {0}
        dask_gpurt.enable(client)
        assert min(client.run(gc.get_freeze_count).values()) > 10_000
        dask_gpurt.disable(client)
        assert set(client.run(gc.get_freeze_count).values()) == {0}
