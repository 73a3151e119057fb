"""A pytest plugin that runs distributed's own tests with the runtime on.

distributed's packages do not contain its tests. They come from a clone, and everything else comes
from the installation (`tests.upstream.clone`). `make test-upstream` shows how to call the plugin.

`differences.toml` lists tests that must fail, with reasons, and tests that are left out. The run
fails in each of these cases:

- A listed test passes, or another one fails.
- Stock Dask's data plane runs a shuffle of a pandas DataFrame, or a rechunk.
- The runtime cannot be attached to a worker.
- A placement decision fails.
- No run of a module about shuffles or rechunks used the runtime.
"""

from __future__ import annotations

import functools
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
from dask_gpurt.plugins.scheduler.gpurt_scheduler import GpurtScheduler
from dask_gpurt.plugins.shuffle.array_run import ArraySpec
from dask_gpurt.plugins.shuffle.frame_run import ADAPTERS, FrameSpec, frame_kind
from tests.upstream import clone
from tests.upstream.transplant import onto_ours

DIFFERENCES = pathlib.Path(__file__).with_name("differences.toml")

#: Timeout of each test, instead of distributed's own.
TIMEOUT_S = 120

#: Specs whose runs were created since the test began.
_specs: list[ShuffleSpec[Any]] = []
#: Workers of this process that got managed memory since the test began.
_stores: list[StoreSwap] = []
#: Reasons why workers could not have the runtime, and errors of placement.
_problems: list[object] = []
#: Workers that placement chose since the test began.
_choices: list[object] = []
#: Counts of runs, workers and tasks on the runtime, over all tests and processes.
_SHUFFLES, _RECHUNKS = "shuffles", "rechunks"
_STORES, _CHOICES = "workers with managed memory", "placed tasks"
_totals = {_SHUFFLES: 0, _RECHUNKS: 0, _STORES: 0, _CHOICES: 0}
#: Kinds of runs that some modules must have; others may have none, or in other processes.
_WANTED = {
    "test_shuffle.py": _SHUFFLES,
    "test_merge.py": _SHUFFLES,
    "test_rechunk.py": _RECHUNKS,
}
#: Kinds of runs on the runtime by module of the test, over all processes.
_seen: dict[str, set[str]] = {}


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    try:
        clone.check(early_config.rootpath)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    # `distributed.utils_test` stores the configuration with which each test begins, so this comes
    # first. Variables of the environment also reach processes that tests start.
    os.environ["DASK_GPURT__ENABLED"] = "true"
    os.environ["DASK_DISTRIBUTED__WORKER__PRELOAD"] = f"['{clone.__name__}']"
    # By default, placement leaves decisions to Dask if machines are not described, as here.
    os.environ["DASK_GPURT__PLACEMENT__POLICY"] = "data-aware"
    # Tests of stealing expect the default bandwidth.
    os.environ["DASK_GPURT__TOPOLOGY__PROBE"] = "off"
    # The first preload is the default.
    os.environ["DASK_DISTRIBUTED__SCHEDULER__PRELOAD"] = (
        f"['dask_gpurt.preload', '{clone.__name__}']"
    )
    os.environ[clone.VARIABLE] = str(early_config.rootpath)
    dask.config.refresh()
    clone.append_paths()
    _give_more_time()
    _find_certificates(early_config.rootpath)


def _find_certificates(root: pathlib.Path) -> None:
    """Find certificates beside the tests; distributed looks for them beside `utils_test`."""
    from distributed import utils_test

    utils_test.get_cert = lambda name: str(root / "distributed" / "tests" / name)


def _give_more_time() -> None:
    """Raise the timeout, because some tests take half of their 30 s, even with stock Dask."""
    from distributed import utils_test

    for decorator in (utils_test.gen_cluster, utils_test.gen_test):
        defaults = decorator.__defaults__ or ()
        decorator.__defaults__ = tuple(
            TIMEOUT_S if value is utils_test._TEST_TIMEOUT else value for value in defaults
        )


def pytest_configure(config: pytest.Config) -> None:
    # This mark is for a plugin that repeats such tests; here they have to pass at once.
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

    # Messages find a handler by the name of its function.
    @functools.wraps(ready)
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


# ---------------------------------------------------------------------- expected failures


def _name(item: pytest.Item) -> str:
    """Return the module and function of a test, without parameters."""
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def listed(items: list[pytest.Item], table: list[dict[str, Any]]) -> dict[pytest.Item, str]:
    """Return the items that a table lists, with the reason for each.

    Raises
    ------
    pytest.UsageError
        The table lists tests that do not exist in collected modules.
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
        return  # a single selected test shows its real outcome
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
        # Our data plane carries chunks of any kind.
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
    """Return the modules without a run of their subject on the runtime."""
    return [module for module, what in _WANTED.items() if what not in seen.get(module, {what})]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, amount in _totals.items():
        terminalreporter.write_line(f"{amount} {what} ran on dask_gpurt")
    for module in idle(_seen):
        terminalreporter.write_line(f"of {module} no {_WANTED[module]} ran on dask_gpurt")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # A selection of tests may contain none that starts a shuffle.
    is_all = not session.config.option.keyword and not any("::" in a for a in session.config.args)
    is_whole = not hasattr(session.config, "workerinput")
    if is_whole and session.testscollected and exitstatus == 0:
        if not any(_totals.values()) or (is_all and idle(_seen)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
