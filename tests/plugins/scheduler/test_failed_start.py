"""A scheduler on which the runtime cannot start stays a stock scheduler."""

from __future__ import annotations

import distributed.scheduler
import pytest
from distributed.utils_test import gen_cluster

import dask_gpurt
from dask_gpurt.plugins.patches import p2p
from dask_gpurt.plugins.scheduler import gpurt_scheduler

#: Each makes a hook.
HOOKS = [
    (gpurt_scheduler, "Placement"),
    (gpurt_scheduler, "Gatherer"),
    (gpurt_scheduler, "LostValues"),
    (p2p, "SpecSwap"),
    (gpurt_scheduler, "Restarts"),
    (gpurt_scheduler, "OutputOwners"),
    (gpurt_scheduler, "FewerTasks"),
    (gpurt_scheduler, "ClusterCollectives"),
    (gpurt_scheduler, "DashboardPage"),
]


class BrokenHookError(Exception):
    pass


def fail(*args, **kwargs):
    raise BrokenHookError("a part of this Dask is unknown")


def state_of(scheduler):
    """Return all that hooks change on a scheduler, but for the counts that it keeps."""
    shuffle = scheduler.plugins["shuffle"]
    counts = {"_active_graph_updates", "cumulative_worker_metrics", "generation", "idle_since"}
    counts |= {"_current_finished_compute", "_memory_other", "_previous_transition_log"}
    return {
        "attributes": {
            name: value
            for name, value in vars(scheduler).items()
            if callable(value) and name not in counts
        },
        "handlers": dict(scheduler.handlers),
        "streams": dict(scheduler.stream_handlers),
        "plugins": dict(scheduler.plugins),
        "worker plugins": dict(scheduler.worker_plugins),
        "callbacks": set(scheduler.periodic_callbacks),
        "routes": [one.target for one in scheduler.http_application.default_router.rules],
        "shuffle": dict(vars(shuffle)),
        "process": {
            name: value for name, value in vars(distributed.scheduler).items() if callable(value)
        },
        "class": {name: value for name, value in vars(type(scheduler)).items() if callable(value)},
    }


@pytest.mark.parametrize("where, failing", HOOKS)
@gen_cluster(client=True, nthreads=[("", 1)])
async def test_a_failure_undoes_the_hooks_before_it(c, s, a, where, failing):
    # The first start makes what stays: the counts of this scheduler.
    await dask_gpurt.enable(c)
    await dask_gpurt.disable(c)
    answers = s.handlers.pop("gpurt_status")
    before = state_of(s)
    s.handlers["gpurt_status"] = answers
    with pytest.MonkeyPatch.context() as patched, pytest.raises(BrokenHookError):
        patched.setattr(where, failing, fail)
        await dask_gpurt.enable(c)
    after = state_of(s)
    assert {name for name in before if before[name] != after[name]} == set()
    assert not (await dask_gpurt.status(c))["active"]
    assert await c.submit(len, b"abc") == 3
    # Nothing that the failure left behind is in the way of the next start.
    await dask_gpurt.enable(c)
    assert [*(await dask_gpurt.status(c))["ready"]] == [a.address]
