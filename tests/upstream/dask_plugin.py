"""A pytest plugin that runs Dask's own tests of arrays and dataframes with the runtime.

Dask's wheel contains its tests, which are written for schedulers of one process. With the plugin,
every computation of a test runs on a cluster, whichever scheduler the test names. A test that uses
the shuffle method "disk" uses "p2p". `make test-dask` shows how to call the plugin. It serves the
tests of packages on top of Dask as well: `make test-suite`.

A test that fails with the runtime runs again on a cluster of stock Dask. If it fails there, too, it
is reported as an expected failure. If it passes there, it is *lost*, and the run fails.
`dask_differences.toml` lists tests that may be lost, with reasons. The run also fails if a listed
test passes, or if stock Dask's data plane runs a shuffle of a pandas DataFrame or a rechunk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.base
import pytest
from _pytest.runner import runtestprotocol
from dask.dataframe.dask_expr.tests import _util
from distributed import Client, LocalCluster, get_worker
from distributed.shuffle._core import ShuffleSpec

import dask_gpurt
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.frame_run import FrameSpec
from tests.upstream.plugin import left_to_stock

DIFFERENCES = Path(__file__).with_name("dask_differences.toml")
#: Most tests that may be lost, over all reasons.
MOST_LOST = 5

N_WORKERS = 2

#: Marks of tests that need an option or a package, with the reason for a skip.
_OPTIONAL = {
    "slow": "slow tests need --runslow",
    "network": "needs a network",
    "gpu": "needs a GPU",
    "array_expr": "needs array expressions, which are another implementation of arrays",
}
#: Modules whose tests start clusters of their own.
_WITH_OWN_CLUSTERS = {"test_distributed.py"}

_ALSO_WITH_STOCK = "fails with stock Dask on a cluster, too"
_SHUFFLES, _RECHUNKS = "shuffles", "rechunks"
_ON_STOCK = "both failed"

_totals = {_SHUFFLES: 0, _RECHUNKS: 0, _ON_STOCK: 0}

#: Specs whose runs were created since the test began.
_specs: list[ShuffleSpec[Any]] = []


class OnCluster(dict[str, Any]):
    """Dask's schedulers by name: the cluster's for tests, Dask's own for their tasks."""

    client: Client | None = None

    def __getitem__(self, name: str) -> Any:
        own = super().__getitem__(name)
        if self.client is None:
            return own
        try:
            get_worker()
        except ValueError:
            return self.client.get
        return own


@dataclasses.dataclass
class Side:
    """A cluster that all tests share, with or without the runtime."""

    is_enabled: bool
    _client: Client | None = None

    def client(self) -> Client:
        """Return a client of an intact cluster; start another one if a test damaged the last."""
        if self._client is None or not self._is_whole(self._client):
            self.close()
            self._client = self._start()
        return self._client

    def _start(self) -> Client:
        with self.configured():
            cluster = LocalCluster(
                n_workers=N_WORKERS,
                threads_per_worker=2,
                processes=False,
                protocol="tcp://",
                dashboard_address=None,
                silence_logs="ERROR",
            )
            client = Client(cluster, set_as_default=False)
        is_active = dask_gpurt.status(client)["active"]
        assert is_active == self.is_enabled, dask_gpurt.status(client)
        return client

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        from distributed import utils_test

        # By default, Dask would rechunk the few chunks of a test by tasks. Not for the whole
        # session: some modules compute while they are imported, without a cluster.
        settings = {"gpurt.enabled": self.is_enabled, "array.rechunk.method": "p2p"}
        # Tests that start their own clusters begin with the configuration in `utils_test`.
        with (
            dask.config.set(settings),
            dask.config.set(settings, config=utils_test.original_config),
        ):
            yield

    @staticmethod
    def _is_whole(client: Client) -> bool:
        scheduler = client.cluster.scheduler
        return (
            client.status == "running"
            and len(scheduler.workers) == N_WORKERS
            and not any(state.processing for state in scheduler.workers.values())
        )

    def close(self) -> None:
        if self._client is not None:
            cluster = self._client.cluster
            self._client.close()
            cluster.close()
            self._client = None


_enabled, _stock = Side(True), Side(False)
_schedulers = OnCluster()


# ---------------------------------------------------------------------- start and end


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run what Dask calls slow, too")
    parser.addoption("--cases", type=int, help="run so many cases of each parametrized test")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    # Other packages call their tests `tests`, too.
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]


def pytest_configure(config: pytest.Config) -> None:
    # See `tests/conftest.py`.
    os.environ["DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"] = "False"
    # By default, placement leaves decisions to Dask if machines are not described, as here.
    os.environ["DASK_GPURT__PLACEMENT__POLICY"] = "data-aware"
    # Periodic work of a cluster would take longer than these small tests.
    os.environ["DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL"] = "1s"
    os.environ["DASK_DISTRIBUTED__ADMIN__SYSTEM_MONITOR__INTERVAL"] = "10s"
    dask.config.refresh()
    # This check would compute divisions, and forbid pickling of expressions, which clients need.
    assert _util.assert_eq.__kwdefaults__ == {"serialize_graph": True}
    _util.assert_eq.__kwdefaults__ = {"serialize_graph": False}
    _schedulers.update(dask.base.named_schedulers)
    dask.base.named_schedulers = _schedulers
    create = ShuffleSpec.create_new_run

    def create_and_count(self: ShuffleSpec[Any], *args: Any, **kwargs: Any) -> Any:
        _specs.append(self)
        return create(self, *args, **kwargs)

    ShuffleSpec.create_new_run = create_and_count  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    _enabled.close()
    _stock.close()


# ---------------------------------------------------------------------- selected tests


def name_of(item: pytest.Item) -> str:
    """Return a test's path below `dask` and its name, without parameters."""
    path = item.path.as_posix().rpartition("/dask/")[2]
    return f"{path}::{getattr(item, 'originalname', item.name)}"


def may_be_lost(text: str) -> dict[str, str]:
    """Return the names of tests that may be lost, with the reasons.

    Raises
    ------
    pytest.UsageError
        A test is listed twice, or too many are listed.
    """
    groups = tomllib.loads(text).get("lost", [])
    pairs = [(name, group["reason"]) for group in groups for name in group["tests"]]
    if len(dict(pairs)) != len(pairs) or len(pairs) > MOST_LOST:
        raise pytest.UsageError(
            f"{DIFFERENCES.name} must list each test once, and at most {MOST_LOST} tests"
        )
    return dict(pairs)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark, reason in _OPTIONAL.items():
            if mark in item.keywords and not (mark == "slow" and config.option.runslow):
                item.add_marker(pytest.mark.skip(reason=reason))
        if spec := getattr(item, "callspec", None):
            for name, value in spec.params.items():
                if isinstance(value, str) and value == "disk":
                    spec.params[name] = "p2p"
    if config.option.cases:
        chosen = choose(items, config.option.cases)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]


def choose(items: list[pytest.Item], n_cases: int) -> set[pytest.Item]:
    """Return a fixed choice of cases of each test, spread evenly over all of its cases."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(f"{item.path}::{getattr(item, 'originalname', item.name)}", []).append(
            item
        )
    chosen = set()
    for all_cases in cases.values():
        step = max(1, len(all_cases) // n_cases)
        # The first case is skipped, because it is the simplest one in most lists.
        chosen |= set(all_cases[step - 1 :: step][:n_cases])
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = attempt(item, nextitem, _enabled)
    fails = any(report.failed for report in reports)
    reason = may_be_lost(DIFFERENCES.read_text()).get(name_of(item))
    if fails and reason is None:
        item._initrequest()  # type: ignore[attr-defined]
        if any(report.failed for report in attempt(item, nextitem, _stock)):
            reason = _ALSO_WITH_STOCK
            item.user_properties.append((_ON_STOCK, 1))
        else:
            # Some tests fail at random, also with stock Dask, so a lost test has to fail twice.
            item._initrequest()  # type: ignore[attr-defined]
            reports = attempt(item, nextitem, _enabled)
            fails = any(report.failed for report in reports)
    elif not fails and reason is not None:
        reports[-1].outcome = "failed"
        reports[-1].longrepr = f"{DIFFERENCES.name} lists it, and it passes"
    for report in reports:
        if fails and report.failed and reason is not None:
            report.outcome = "skipped"
            report.wasxfail = reason
        if report.when == "teardown":
            report.user_properties = list(item.user_properties)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def attempt(item: pytest.Item, nextitem: pytest.Item | None, side: Side) -> Any:
    """Run a test on one of the two clusters."""
    _specs.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(side.configured())
        if item.path.name not in _WITH_OWN_CLUSTERS:
            client = side.client()
            stack.enter_context(client.as_current())
            _schedulers.client = client
        try:
            return runtestprotocol(item, nextitem=nextitem, log=False)
        finally:
            _schedulers.client = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    if dask.config.get("gpurt.enabled"):
        item.user_properties += [
            (_SHUFFLES, sum(isinstance(spec, FrameSpec) for spec in _specs)),
            (_RECHUNKS, sum(isinstance(spec, ArraySpec) for spec in _specs)),
        ]
        assert not list(filter(left_to_stock, _specs)), "left to stock Dask"
    return result


# ---------------------------------------------------------------------- was the runtime on?


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for what, amount in report.user_properties:
            if what in _totals:
                _totals[what] += amount  # type: ignore[operator]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"{_totals[_SHUFFLES]} shuffles and {_totals[_RECHUNKS]} rechunks ran on dask_gpurt; "
        f"{_totals[_ON_STOCK]} tests failed with it and with stock"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_choice = session.config.option.keyword or any("::" in a for a in session.config.args)
    is_whole = not hasattr(session.config, "workerinput")
    if is_whole and exitstatus == 0 and not is_choice:
        if not _totals[_SHUFFLES] and not _totals[_RECHUNKS]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
