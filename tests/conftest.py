"""Fixtures of the whole suite: clusters with and without the runtime, side by side."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dask
import hypothesis
import pytest
from distributed import Client, LocalCluster, Nanny, utils_test

import dask_gpurt
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.transport.ucx.thread import UcxThread
from tests.thoroughness import left_out

# There is no deadline, because the time of an example depends on the machine.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

# A test has thirty seconds by default, which a busy machine exceeds. Test modules are imported
# later than this file.
utils_test.gen_cluster = functools.partial(utils_test.gen_cluster, timeout=120)


def _reset_config() -> None:
    """Restore the configuration before a test, and never leave it empty.

    distributed's own function does for some milliseconds. Clusters of a whole session, as of the
    fixture `sides`, run at that time: a heartbeat without a configuration closes its worker.
    """
    config = dask.config.config
    config.update(copy.deepcopy(utils_test.original_config))
    for name in config.keys() - utils_test.original_config.keys():
        del config[name]


utils_test.reset_config = _reset_config


def pytest_configure() -> None:
    # A shell starts background programs with interrupts ignored, and their children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On Python 3.11 Dask's profiler can stop the process for good: `sys._current_frames` collects
    # garbage while it holds a lock of the interpreter's that Arrow's threads wait for with the
    # GIL. No timeout of a test ends that. distributed's own tests switch it off, too.
    dask.config.set({"distributed.worker.profile.enabled": False})
    os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"
    # Worker processes are forked from one that has imported the common modules. This saves 1.5 s
    # of a core for each. Workers of scripts and of the command line are not forked.
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    # A local cluster gives up a worker whose process ended and is not back after 15 s. On a busy
    # machine, workers start slower than that.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "5 minutes"})
    # distributed's tests restore what they found when they were imported, before this.
    utils_test.original_config = copy.deepcopy(dask.config.config)


#: With more objects than this, a full garbage collection takes a tenth of a second.
MANY_OBJECTS = 200_000
#: Files and folders with the longest files.
_LONG = ("test_docs_run.py", "standins", "upstream", "kubernetes", "slurm", "thirdparty")


def _begins_late(item: pytest.Item) -> bool:
    return not any(name in item.path.parts for name in _LONG)


#: Folders whose tests `make test` runs with the newest versions only, unless they are slow.
_NEWEST = ("tests/integration", "tests/plugins", "tests/simulate")
#: These touch private names of dask and distributed, so they run with the oldest versions, too.
_BOTH = ("tests/plugins/patches", "tests/plugins/shuffle")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(_NEWEST) and not item.nodeid.startswith(_BOTH):
            if item.get_closest_marker("slow") is None:
                item.add_marker(pytest.mark.newest)
    # A test that is named runs with all its cases.
    if not any("::" in one for one in config.args) and (out := left_out(items)):
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    # Long files first: with several processes, the others have much to do meanwhile. By itself,
    # xdist begins with the files that have most tests; `--no-loadscope-reorder` keeps this order.
    items.sort(key=_begins_late)


def pytest_collection_finish() -> None:
    # The collected tests are half a million objects that live to the end. Without a freeze, each
    # full garbage collection visits them for half a second, and tests and Dask start many.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # distributed keeps closed schedulers and workers, so millions of objects are left by tests of
    # clusters in this process.
    if (nextitem is None or nextitem.path != item.path) and (
        len(gc.get_objects(generation=2)) > MANY_OBJECTS
    ):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nannies_are_patient() -> Iterator[None]:
    """Give workers more than Dask's five seconds to exit, which a busy machine needs.

    A worker that is killed instead leaves its files, and its cluster's `close` raises.
    """
    close = Nanny.close

    async def patient(nanny: Nanny, timeout: float = 60.0, reason: str = "nanny-close") -> str:
        return await close(nanny, timeout=timeout, reason=reason)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nanny, "close", patient)
        yield


@dataclass(frozen=True)
class Sides:
    """A client of a stock cluster and one of a cluster with the runtime on."""

    stock: Client
    enabled: Client


@contextlib.contextmanager
def stock_client(n_workers: int, n_threads: int = 1) -> Iterator[Client]:
    """Start a stock cluster in this process, with real sockets; its client is not the default."""
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=n_threads,
            processes=False,
            protocol="tcp://",
            dashboard_address=":0",
            # Silencing distributed would also silence the fixture that captures logs.
            silence_logs=False,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def client() -> Iterator[Client]:
    with stock_client(2) as client:
        yield client


@contextlib.contextmanager
def two_clusters(n_workers: int) -> Iterator[Sides]:
    with (
        dask.config.set({"gpurt.enabled": False}),
        stock_client(n_workers) as stock,
        stock_client(n_workers) as enabled,
    ):
        dask_gpurt.enable(enabled)
        yield Sides(stock, enabled)


@pytest.fixture(scope="session")
def sides() -> Iterator[Sides]:
    with two_clusters(3) as clients:
        yield clients


@pytest.fixture(scope="session")
def ucx_sides(sides: Sides) -> Iterator[Sides]:
    pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    with stock_client(3) as enabled:
        with dask.config.set({"gpurt.shuffle.transport": "ucx"}):
            dask_gpurt.enable(enabled)
        yield Sides(sides.stock, enabled)


def received_over_ucx(dask_worker: Any) -> int:
    """Return how many messages a worker has received over UCX."""
    engine = runtime_of(dask_worker).links.ucx.started
    return 0 if engine is None else int(engine.report().get("received_messages", 0))


@pytest.fixture
def over_ucx(ucx_sides: Sides) -> Iterator[Sides]:
    """Like `sides`, but shards go over UCX only; the test has to send some to other workers."""
    before = ucx_sides.enabled.run(received_over_ucx)
    yield ucx_sides
    after = ucx_sides.enabled.run(received_over_ucx)
    assert sum(after.values()) > sum(before.values()), "nothing went over UCX"
    workers = dask_gpurt.status(ucx_sides.enabled)["workers"].values()
    assert {link["path"] for worker in workers for link in worker["links"].values()} == {"ucx"}


@pytest.fixture(params=["sides", "over_ucx"], ids=["shared", "ucx"])
def each_way(request: pytest.FixtureRequest) -> Sides:
    """Run a test twice: with shards in shared memory, and with shards over UCX."""
    sides: Sides = request.getfixturevalue(request.param)
    return sides


ours = logging.Filter("dask_gpurt")


@pytest.fixture(autouse=True)
def logs_of_ours_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Capture our logs even if another cluster of this process has silenced its own."""
    caplog.handler.setLevel(0)
    caplog.handler.addFilter(ours)


@pytest.fixture
def without_ucxx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that `ucxx` is not installed, and that no engine was opened before."""
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setattr(UcxThread, "_free", {})
