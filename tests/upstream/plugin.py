"""Runs distributed's own tests of what the runtime takes over, with it on: a pytest plugin.

Neither wheels nor source archives of distributed have its tests in them, so they come from a clone
of it, and everything else from the installation (`tests.upstream.clone`). `make test-upstream` says
how it is called.

`differences.toml` lists the tests that must fail, with a reason each, and those that are left out.
A listed test that passes fails the run, as does one that is not listed and fails. So does any
shuffle of a pandas DataFrame and any rechunk that ends up on stock's data plane, any worker that
the runtime could not be attached to, and any decision about a task in which placement failed. So
does a module of shuffles or rechunks of which nothing was seen to run on ours.
"""

from __future__ import annotations

import os
import pathlib
import tomllib
from collections.abc import Iterator
from typing import Any

import dask.config
import pytest
from distributed.shuffle import _rechunk, _shuffle
from distributed.shuffle._core import ShuffleSpec

from dask_gpurt.plugins.patches.worker_memory import StoreSwap
from dask_gpurt.plugins.placement.placer import Placement
from dask_gpurt.plugins.scheduler import GpurtScheduler
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.frame_run import ADAPTERS, FrameSpec, frame_kind
from tests.upstream import clone
from tests.upstream.transplant import onto_ours

DIFFERENCES = pathlib.Path(__file__).with_name("differences.toml")

#: For each test, instead of distributed's own.
TIMEOUT_S = 120

#: Specs that runs were created of since the test began.
_specs: list[ShuffleSpec[Any]] = []
#: Workers of this process that got managed memory since the test began.
_stores: list[StoreSwap] = []
#: Why workers could not have the runtime, and errors of placement.
_problems: list[object] = []
#: Workers that placement chose since the test began.
_choices: list[object] = []
#: What ran on the runtime, over all tests and processes.
_SHUFFLES, _RECHUNKS = "shuffles", "rechunks"
_STORES, _CHOICES = "workers with managed memory", "placed tasks"
_totals = {_SHUFFLES: 0, _RECHUNKS: 0, _STORES: 0, _CHOICES: 0}
#: What has to be seen of some modules; others may have none, or have it in other processes.
_WANTED = {
    "test_shuffle.py": _SHUFFLES,
    "test_merge.py": _SHUFFLES,
    "test_rechunk.py": _RECHUNKS,
}
#: By module of which a test was called, what of it ran on the runtime, over all processes.
_seen: dict[str, set[str]] = {}


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    try:
        clone.check(early_config.rootpath)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    # Before `distributed.utils_test` keeps the configuration that each test begins with, and in the
    # environment for processes that tests start.
    os.environ["DASK_GPURT__ENABLED"] = "true"
    os.environ["DASK_DISTRIBUTED__WORKER__PRELOAD"] = f"['{clone.__name__}']"
    # By itself placement leaves choices to stock where no machines are described, as here.
    os.environ["DASK_GPURT__PLACEMENT__POLICY"] = "data-aware"
    # Tests of stealing reckon with the bandwidth that is assumed at first.
    os.environ["DASK_GPURT__TOPOLOGY__PROBE"] = "off"
    # The first is what is there otherwise.
    os.environ["DASK_DISTRIBUTED__SCHEDULER__PRELOAD"] = (
        f"['dask_gpurt.preload', '{clone.__name__}']"
    )
    os.environ[clone.VARIABLE] = str(early_config.rootpath)
    dask.config.refresh()
    clone.append_paths()
    _give_more_time()
    _find_certificates(early_config.rootpath)


def _find_certificates(root: pathlib.Path) -> None:
    """They are beside the tests, and looked for beside `utils_test`."""
    from distributed import utils_test

    utils_test.get_cert = lambda name: str(root / "distributed" / "tests" / name)


def _give_more_time() -> None:
    """Some tests take half of their 30 s on an idle machine, with stock as well."""
    from distributed import utils_test

    for decorator in (utils_test.gen_cluster, utils_test.gen_test):
        defaults = decorator.__defaults__ or ()
        decorator.__defaults__ = tuple(
            TIMEOUT_S if value is utils_test._TEST_TIMEOUT else value for value in defaults
        )


def pytest_configure(config: pytest.Config) -> None:
    # Of a plugin that runs such tests again; here they have to pass at once.
    config.addinivalue_line("markers", "flaky: passes sometimes, on other systems")
    stock_create = ShuffleSpec.create_new_run
    swap, ready = StoreSwap.__init__, GpurtScheduler.worker_ready

    def create_new_run(self: ShuffleSpec[Any], *args: Any, **kwargs: Any) -> Any:
        _specs.append(self)
        return stock_create(self, *args, **kwargs)

    def create_run_on_worker(self: FrameSpec, *args: Any, **kwargs: Any) -> Any:
        return onto_ours(_shuffle.DataFrameShuffleRun)(self, *args, **kwargs)

    def swap_and_count(self: StoreSwap, *args: Any, **kwargs: Any) -> None:
        _stores.append(self)
        swap(self, *args, **kwargs)

    async def ready_or_not(self: GpurtScheduler, worker: str, problem: str | None) -> None:
        if problem is not None:
            _problems.append(problem)
        await ready(self, worker, problem)

    place, failed = Placement.place, Placement.failed

    def place_and_count(self: Placement, *args: Any) -> Any:
        found = place(self, *args)
        _choices.append(found)
        return found

    def failed_and_told(self: Placement, error: Exception) -> None:
        _problems.append(error)
        failed(self, error)

    Placement.place = place_and_count  # type: ignore[method-assign]
    Placement.failed = failed_and_told  # type: ignore[method-assign]
    StoreSwap.__init__ = swap_and_count  # type: ignore[method-assign]
    GpurtScheduler.worker_ready = ready_or_not  # type: ignore[method-assign]
    ShuffleSpec.create_new_run = create_new_run  # type: ignore[method-assign]
    FrameSpec.create_run_on_worker = create_run_on_worker  # type: ignore[method-assign]


# ---------------------------------------------------------------------- what must fail


def _name(item: pytest.Item) -> str:
    """Module and function of a test, without parameters."""
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def listed(items: list[pytest.Item], table: list[dict[str, Any]]) -> dict[pytest.Item, str]:
    """Items that a table names, with the reason it has for each.

    Raises
    ------
    pytest.UsageError
        The table names tests that do not exist in modules that were collected.
    """
    reasons = {name: group["reason"] for group in table for name in group["tests"]}
    modules = {item.path.name for item in items}
    stale = {name for name in reasons if name.split("::")[0] in modules}
    found = {}
    for item in items:
        # A table may name a function, or one case of it.
        for name in (_name(item), f"{item.path.name}::{item.name}"):
            stale.discard(name)
            if name in reasons:
                found[item] = reasons[name]
    if stale:
        raise pytest.UsageError(f"{DIFFERENCES.name} lists unknown tests: {sorted(stale)}")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return  # one test was asked for: show what it does
    table = tomllib.loads(DIFFERENCES.read_text())
    left_out = listed(items, table["left_out"])
    for item, reason in listed(items, table["fails"]).items():
        item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


# ---------------------------------------------------------------------- was the runtime on?


def left_to_stock(spec: ShuffleSpec[Any]) -> bool:
    """Return whether Dask's data plane has a run that ours could have had."""
    if isinstance(spec, _rechunk.ArrayRechunkSpec):
        # Chunks of any kind are carried.
        return not isinstance(spec, ArraySpec)
    assert isinstance(spec, _shuffle.DataFrameShuffleSpec), spec
    return not isinstance(spec, FrameSpec) and frame_kind(spec.meta) in ADAPTERS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    for seen in (_specs, _stores, _problems, _choices):
        seen.clear()
    try:
        result = yield
    finally:
        item.user_properties += [
            (_SHUFFLES, sum(isinstance(spec, FrameSpec) for spec in _specs)),
            (_RECHUNKS, sum(isinstance(spec, ArraySpec) for spec in _specs)),
            (_STORES, len(_stores)),
            (_CHOICES, len(_choices)),
        ]
    assert not _problems
    assert not list(filter(left_to_stock, _specs)), "left to stock Dask"
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        module = pathlib.Path(report.location[0]).name
        _seen.setdefault(module, set())
        for what, amount in report.user_properties:
            if what in _totals:
                _totals[what] += amount  # type: ignore[operator]
                if amount:
                    _seen[module].add(what)


def idle(seen: dict[str, set[str]]) -> list[str]:
    """Modules of which nothing that they are about was seen to run on the runtime."""
    return [module for module, what in _WANTED.items() if what not in seen.get(module, {what})]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, amount in _totals.items():
        terminalreporter.write_line(f"{amount} {what} ran on dask_gpurt")
    for module in idle(_seen):
        terminalreporter.write_line(f"of {module} no {_WANTED[module]} ran on dask_gpurt")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # A choice of tests may have none that starts a shuffle.
    is_all = not session.config.option.keyword and not any("::" in a for a in session.config.args)
    is_whole = not hasattr(session.config, "workerinput")
    if is_whole and session.testscollected and exitstatus == 0:
        if not any(_totals.values()) or (is_all and idle(_seen)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
