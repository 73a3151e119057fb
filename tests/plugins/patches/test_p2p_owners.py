"""Contract tests of how distributed assigns output partitions, and tests of the patch."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import LocalCluster, Scheduler
from distributed.shuffle._core import barrier_key
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin

from dask_gpurt.plugins.patches.p2p_owners import OutputOwners, allowed

ABSENT = "tcp://127.0.0.1:1"
UNRESTRICTED = dict.fromkeys(
    ["worker_restrictions", "host_restrictions", "resource_restrictions"], None
)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_distributed_has_what_we_replace() -> None:
    plugin = ShuffleSchedulerPlugin
    assert parameters(plugin._calculate_worker_for) == ["self", "spec"]
    source = inspect.getsource(plugin._calculate_worker_for)
    assert "workers = list(barrier.worker_restrictions)" in source
    assert not inspect.iscoroutinefunction(plugin._calculate_worker_for)
    assert "self._calculate_worker_for(spec)" in inspect.getsource(plugin._create)
    assert parameters(plugin._set_restriction) == ["self", "ts", "worker"]
    assert parameters(plugin._unset_restriction) == ["self", "ts"]
    assert "self._set_restriction(ts, worker)" in inspect.getsource(plugin.restrict_task)
    assert "self._unset_restriction(dt)" in inspect.getsource(plugin._clean_on_scheduler)


#: Restrictions on addresses, hosts and resources; `there` has the addresses of two workers.
RESTRICTIONS = {
    "none": lambda there: {},
    "one": lambda there: {"worker_restrictions": {there[0]}},
    "one of two": lambda there: {"worker_restrictions": {there[0], ABSENT}},
    "host": lambda there: {"host_restrictions": {"127.0.0.1"}},
    "absent host and one": lambda there: {
        "host_restrictions": {"nowhere.invalid"},
        "worker_restrictions": {there[1]},
    },
    "resource": lambda there: {"resource_restrictions": {"GPU": 1}},
    "too much of it": lambda there: {"resource_restrictions": {"GPU": 2}},
    "unknown resource": lambda there: {"resource_restrictions": {"TPU": 1}},
    "resource and worker": lambda there: {
        "resource_restrictions": {"GPU": 1},
        "worker_restrictions": set(there),
    },
    "absent": lambda there: {"worker_restrictions": {ABSENT}},
}


@pytest.fixture(scope="module")
def scheduler() -> Any:
    workers = {"processes": False, "threads_per_worker": 1, "protocol": "tcp://"}
    with LocalCluster(n_workers=2, dashboard_address=":0", silence_logs=50, **workers) as cluster:
        first = cluster.workers[0]
        cluster.sync(first.set_resources, GPU=1)

        async def is_told() -> None:
            while not cluster.scheduler.resources.get("GPU"):
                await asyncio.sleep(0)

        cluster.sync(is_told)
        yield cluster.scheduler


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_the_allowed_workers_are_those_of_the_scheduler(scheduler: Scheduler, name: str) -> None:
    task: Any = SimpleNamespace(**{**UNRESTRICTED, **RESTRICTIONS[name](sorted(scheduler.workers))})
    valid = scheduler.valid_workers(task)
    assert allowed(scheduler, task) == ({ws.address for ws in valid} if valid else None)


class Plugin:
    """The methods of distributed's plugin that `OutputOwners` replaces."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _calculate_worker_for(self, spec: Any) -> dict[int, str]:
        self.seen.append(spec.barrier.worker_restrictions)
        if spec.fails:
            raise RuntimeError("no owners")
        return {0: "here"}

    def _set_restriction(self, ts: Any, worker: str) -> None:
        if ts.annotations:
            return
        ts.annotations = {"shuffle_original_restrictions": ts.worker_restrictions}
        ts.worker_restrictions = {worker}

    def _unset_restriction(self, ts: Any) -> None:
        ts.worker_restrictions = ts.annotations.pop("shuffle_original_restrictions")


def stage(**restrictions: Any) -> tuple[Plugin, Any, OutputOwners]:
    """Return a plugin, a barrier, and the patch."""
    barrier = SimpleNamespace(annotations=None, **{**UNRESTRICTED, **restrictions})
    plugin = Plugin()
    scheduler: Any = SimpleNamespace(
        plugins={"shuffle": plugin},
        tasks={barrier_key("a"): barrier},  # type: ignore[arg-type]
        workers={"here": None},
        host_info={"h": {"addresses": {"here"}}},
        coerce_hostname=str,
        resources={},
    )
    return plugin, barrier, OutputOwners(scheduler)


@pytest.mark.parametrize("fails", [False, True])
def test_choosing_owners_leaves_the_restrictions_unchanged(fails: bool) -> None:
    stated = {"here", ABSENT}
    plugin, barrier, _ = stage(worker_restrictions=stated)
    spec = SimpleNamespace(id="a", barrier=barrier, fails=fails)
    if fails:
        with pytest.raises(RuntimeError, match="no owners"):
            plugin._calculate_worker_for(spec)
    else:
        assert plugin._calculate_worker_for(spec) == {0: "here"}
    assert plugin.seen == [{"here"}]
    assert barrier.worker_restrictions is stated


def test_a_restriction_to_hosts_is_suspended_while_a_task_has_an_owner() -> None:
    plugin, task, _ = stage(host_restrictions={"h"})
    plugin._set_restriction(task, "here")
    assert (task.worker_restrictions, task.host_restrictions) == ({"here"}, None)
    # A second time, as the second barrier of a join does.
    plugin._set_restriction(task, "here")
    assert task.host_restrictions is None
    plugin._unset_restriction(task)
    assert task.host_restrictions == {"h"}


def test_uninstall_restores_an_earlier_patch() -> None:
    plugin, _, owners = stage()
    owners.uninstall()
    assert set(vars(plugin)) == {"seen"}
    plugin._calculate_worker_for = before = lambda spec: {}  # type: ignore[method-assign]
    scheduler: Any = SimpleNamespace(plugins={"shuffle": plugin}, tasks={})
    again = OutputOwners(scheduler)
    assert plugin._calculate_worker_for is not before
    again.uninstall()
    assert plugin._calculate_worker_for is before
