"""Garbage collections skip long-lived objects while the runtime is on, and only then."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import poll_for

import dask_gpurt
from dask_gpurt.plugins.memory.gc_freeze import (
    CHECKS_PER_COLLECTION,
    MANY_MODULES,
    GcFreeze,
)

NANNY = "tcp://192.0.2.1:1"


def worker_with(nanny=NANNY, data=(), tasks=(), n_transitions=0):
    state = SimpleNamespace(tasks=tasks, transition_counter=n_transitions)
    return SimpleNamespace(nanny=nanny, data=data, state=state)


OWN_PROCESS = worker_with()


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


def test_garbage_of_tasks_is_collected_before_the_freeze():
    old = weakref.ref(Cycle())
    GcFreeze(worker_with(n_transitions=1))
    assert old() is None


def import_many():
    """Import as many modules as a large library has."""
    for number in range(MANY_MODULES):
        sys.modules[f"imported_{number}"] = ModuleType("imported")


def test_libraries_that_tasks_import_are_frozen(monkeypatch):
    worker = worker_with(data={}, tasks={})
    frozen = GcFreeze(worker)
    imported = Cycle()
    reference = weakref.ref(imported)
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    import_many()
    worker.state.tasks["x"] = None
    frozen.renew()
    del worker.state.tasks["x"]
    garbage = weakref.ref(Cycle())
    frozen.renew()
    assert garbage() is None
    del imported
    assert not is_collected(reference)
    frozen.close()
    assert is_collected(reference)


def test_frozen_garbage_is_collected_when_there_is_no_task():
    worker = worker_with(data={}, tasks={})
    model = Cycle()
    reference = weakref.ref(model)
    frozen = GcFreeze(worker)
    del model
    for _ in range(CHECKS_PER_COLLECTION - 1):
        frozen.renew()
    worker.state.tasks["x"] = None
    frozen.renew()
    assert reference() is not None, "not while there are tasks"
    del worker.state.tasks["x"]
    frozen.renew()
    assert reference() is None
    assert gc.get_freeze_count(), "the rest is frozen again"


def test_few_new_modules_are_not_frozen(monkeypatch):
    frozen = GcFreeze(worker_with())
    monkeypatch.setitem(sys.modules, "imported", None)
    new = Cycle()
    reference = weakref.ref(new)
    frozen.renew()
    del new
    assert is_collected(reference)


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(worker_with(nanny=None), id="a process of the user's"),
        pytest.param(worker_with(data={"x": 1}), id="values"),
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


@pytest.mark.cluster
def test_imports_of_tasks_are_frozen_when_the_tasks_are_gone():
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}

    def frozen():
        return min(client.run(gc.get_freeze_count).values())

    with (
        LocalCluster(silence_logs=50, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        before = frozen()
        client.submit(import_many).result()
        poll_for(lambda: frozen() >= before + MANY_MODULES, timeout=60)
        dask_gpurt.disable(client)
        assert frozen() == 0
