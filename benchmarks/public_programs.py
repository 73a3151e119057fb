"""Seconds of Dask programs that others wrote as benchmarks, stock against the runtime.

The programs are the tests of `tests/benchmarks` in github.com/coiled/benchmarks: arrays, frames,
joins, rechunks, spilling, group-bys and futures. Pass the directory of a checkout; nothing of it is
changed. Many scale their data with the memory of the cluster. Those that need data of a cloud are
left out, except the group-bys of h2o, whose tables are made here.

    python -m benchmarks.public_programs DIR
    python -m benchmarks.public_programs DIR --only "test_join or test_rechunk" --repeats 5

`--only` is an expression of pytest's `-k`. Each run has a new cluster, whose program has the one
flag or not. Sides take turns. `test_xarray` needs xarray and flox.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from distributed import Client

from benchmarks.harness import Timing, arguments, flagged_client, write_json

#: Programs that read data of a cloud, last a given time, or start clusters of their own.
LEFT_OUT = (
    "test_csv",
    "test_custom",
    "test_filter_then_average",
    "test_parquet",
    "test_set_index_on_uber_lyft",
    "test_work_stealing_on_scaling_up",
    "test_work_stealing_on_straggling_worker",
    "test_xarray_groupby_reduction",
    "test_xgboost",
    "test_zarr",
)
#: Rows and files of the table of h2o's group-bys, and its number of groups.
N_ROWS, N_FILES, N_GROUPS = 5_000_000, 20, 100


class Turn(NamedTuple):
    """One run of a program, of all turns that sides take."""

    number: int
    side: str


class Runs:
    """What the runs of all programs have shown. pytest calls the methods that begin with its name.

    Parameters
    ----------
    repeats
        Runs of each program on each side.
    memory
        Memory limit of each of the two workers, as Dask takes it.
    folder
        For tables that are made here.
    """

    def __init__(self, repeats: int, memory: str, folder: Path) -> None:
        self._repeats, self._memory, self._folder = repeats, memory, folder
        self.timings: dict[str, Timing] = {}
        #: By program and side, the error of a run.
        self.failed: dict[tuple[str, str], str] = {}

    # ------------------------------------------------------------------ fixtures of the programs

    @pytest.fixture
    def turn(self, request: pytest.FixtureRequest) -> Turn:
        found: Turn = request.param
        return found

    @pytest.fixture
    def small_client(self, turn: Turn) -> Iterator[Client]:
        with flagged_client(turn.side == "enabled", self._memory) as client:
            yield client

    @pytest.fixture
    def spill_client(self, small_client: Client) -> Client:
        return small_client

    @pytest.fixture(params=["uncompressible", "compressible"])
    def new_array(self, request: pytest.FixtureRequest) -> Any:
        if request.param == "uncompressible":
            return da.random.random

        def half_zeros(block: Any) -> Any:
            flat = block.reshape(-1)
            flat[::2] = 0
            return flat.reshape(block.shape)

        def made(*args: Any, **kwargs: Any) -> da.Array:
            found = da.random.random(*args, **kwargs)
            return found.map_blocks(half_zeros, dtype=found.dtype)

        return made

    @pytest.fixture(params=[0.1, 0.5])
    def memory_multiplier(self, request: pytest.FixtureRequest) -> float:
        found: float = request.param
        return found

    @pytest.fixture(params=["tasks", "p2p"])
    def shuffle_method(self, request: pytest.FixtureRequest) -> str:
        found: str = request.param
        return found

    @pytest.fixture
    def configure_shuffling(self, shuffle_method: str) -> Iterator[None]:
        with dask.config.set({"dataframe.shuffle.method": shuffle_method}):
            yield

    # ------------------------------------------------------------------ calls of pytest

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "turn" in metafunc.fixturenames:
            turns = []
            for repeat in range(self._repeats):
                order = ("stock", "enabled") if repeat % 2 == 0 else ("enabled", "stock")
                turns += [Turn(2 * repeat + n, side) for n, side in enumerate(order)]
            ids = [f"turn{turn.number}" for turn in turns]
            metafunc.parametrize("turn", turns, ids=ids, indirect=True)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            one
            for one in items
            if "turn" in one.fixturenames and not any(name in one.nodeid for name in LEFT_OUT)
        ]
        names = {name: n for n, name in enumerate(dict.fromkeys(_program(i.nodeid) for i in items))}

        def in_turns(item: Any) -> tuple[int, int]:
            return names[_program(item.nodeid)], item.callspec.params["turn"].number

        items.sort(key=in_turns)
        for module in {item.module for item in items if hasattr(item.module, "DATASETS")}:
            table = str(_h2o_table(self._folder) / "*.parquet")
            module.DATASETS.update(dict.fromkeys(module.DATASETS, table))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[None]:
        report: Any = yield
        if call.when == "call" and not report.skipped:
            side, program = item.callspec.params["turn"].side, _program(item.nodeid)
            if report.passed:
                timing = self.timings.setdefault(program, Timing(program, 0))
                getattr(timing, f"{side}_s").append(call.duration)
            else:
                self.failed[program, side] = str(call.excinfo.value).partition("\n")[0][:100]
            shown = f"{call.duration:.2f} s" if report.passed else self.failed[program, side]
            print(f"  {program} {side}: {shown}", file=sys.stderr, flush=True)
        return report  # type: ignore[no-any-return]


def _program(nodeid: str) -> str:
    """Return the name of a program with its parameters, but without the turn."""
    name = re.sub(r"-?turn\d+", "", nodeid.rpartition("benchmarks/")[2])
    return name.replace("[-", "[").replace("[]", "").replace(".py::", " ")


def _h2o_table(folder: Path) -> Path:
    """Make the table of h2o's group-bys in a folder, and return its directory."""
    found = folder / "h2o"
    found.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(108)
    many, rows = N_ROWS // N_GROUPS, N_ROWS // N_FILES
    for n in range(N_FILES):
        text = {
            name: pd.Series(rng.integers(1, most + 1, rows)).map(f"id{{:0{width}d}}".format)
            for name, most, width in (("id1", N_GROUPS, 3), ("id2", N_GROUPS, 3), ("id3", many, 10))
        }
        numbers = {
            name: rng.integers(1, most + 1, rows).astype("int32")
            for name, most in (
                ("id4", N_GROUPS),
                ("id5", N_GROUPS),
                ("id6", many),
                ("v1", 5),
                ("v2", 15),
            )
        }
        frame = pd.DataFrame({**text, **numbers, "v3": rng.uniform(0, 100, rows).round(6)})
        frame.to_parquet(found / f"{n:03}.parquet", index=False)
    return found


def _stub(name: str, **content: Any) -> None:
    """Put a module in place of one that reads a cloud's settings."""
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("checkout", type=Path, metavar="DIR", help="checkout of coiled/benchmarks")
    parser.add_argument("--memory", default="2 GiB", help="memory limit of each worker")
    parser.add_argument("--limit-s", type=float, default=180, help="longest time of one run")
    parser.add_argument("--folder", type=Path, default=Path("build/public"), help="for tables")
    options = parser.parse_args()
    runs = Runs(options.repeats, options.memory, options.folder.absolute())
    clusters = {"n_workers": 2, "worker_vm_types": ["m6i.large"]}
    always = pytest.mark.skipif(False, reason="")
    _stub("coiled", Cluster=None)
    _stub(
        "tests.conftest",
        dump_cluster_kwargs=None,
        load_cluster_kwargs=lambda: {"small_cluster": clusters},
        requires_p2p_memory=always,
        requires_p2p_rechunk=always,
    )
    checkout = options.checkout.absolute()
    # Its package is named `tests`, too.
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)
    # `Runs` has fixtures of the same names. These here would start clusters in a cloud.
    spilling = importlib.import_module("tests.benchmarks.test_spill")
    del spilling.spill_client, spilling.spill_cluster
    folder = checkout / "tests" / "benchmarks"
    files = [str(one) for one in folder.glob("test_*.py") if one.stem not in LEFT_OUT]
    chosen = ["-k", options.only] if options.only else []
    settings = ["-c", os.devnull, "--rootdir", str(checkout), "--noconftest", "-p", "no:terminal"]
    settings += ["-p", "no:cacheprovider", "--timeout", str(options.limit_s)]
    ended = pytest.main([*settings, "-W", "ignore", *chosen, *sorted(files)], plugins=[runs])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {ended!r}")
    timings = [one for one in runs.timings.values() if one.stock_s and one.enabled_s]
    for timing in timings:
        print(timing.line(), flush=True)
    for (program, side), error in sorted(runs.failed.items()):
        print(f"{program} failed on {side}: {error}", flush=True)
    failed = [{"program": p, "side": side, "error": e} for (p, side), e in runs.failed.items()]
    write_json(options.json, timings, failed=failed)


if __name__ == "__main__":
    main()
