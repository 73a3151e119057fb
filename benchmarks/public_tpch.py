"""Seconds of TPC-H queries that others wrote for Dask, stock against the runtime.

There are two public sets: `tests/tpch/dask_queries.py` of github.com/coiled/benchmarks, with all 22
queries, and `queries/dask` of github.com/pola-rs/polars-benchmark, with seven. Pass the directory
of a checkout; nothing of it is changed. Two clusters live for the whole run, queries take turns,
and the answers of both sides are compared. Times include reading the Parquet files.

    python -m benchmarks.public_tpch --coiled DIR --polars DIR
    python -m benchmarks.public_tpch --coiled DIR --only "query_0[16]$" --repeats 25

The second command runs two queries without a shuffle. `--only` is a regular expression here.
"""

from __future__ import annotations

import importlib.util
import math
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
from dask.base import is_dask_collection
from distributed import Client

from benchmarks.harness import Timing, arguments, idle, two_clusters, write_json
from dask_gpurt.demo.tpch_data import make_tpch

#: Returns the answer of a query, as a DataFrame or a lazy one.
Query = Callable[[], Any]
#: Names of the tables in the second set's functions, where they differ, and all of them.
_TABLES = {"line_item": "lineitem", "part_supp": "partsupp"}
_NAMES = ("customer", "nation", "orders", "part", "region", "supplier", *_TABLES)


def coiled_queries(checkout: Path, tables: Path, scale: float) -> Iterator[tuple[str, Query]]:
    """Yield name and query of each query of coiled/benchmarks."""
    module = _loaded(checkout / "tests" / "tpch" / "dask_queries.py", "coiled_queries")
    for name, query in sorted(vars(module).items()):
        if name.startswith("query_"):
            yield f"coiled {name}", partial(query, f"{tables}/", None, scale)


def polars_queries(checkout: Path, tables: Path) -> Iterator[tuple[str, Query]]:
    """Yield name and query of each query of pola-rs/polars-benchmark."""
    found: list[Query] = []
    # The set's own module reads settings and times by itself.
    stub = types.ModuleType("queries.dask.utils")
    for name in _NAMES:
        table = str(tables / _TABLES.get(name, name))

        def read(path: str = table) -> dd.DataFrame:
            frame = dd.read_parquet(path, dtype_backend="pyarrow")
            # Its queries compare with dates, and these tables have times.
            for column in frame.columns:
                if column.endswith("date"):
                    frame[column] = frame[column].astype("date32[day][pyarrow]")
            return frame

        setattr(stub, f"get_{name}_ds", read)
    stub.run_query = lambda number, query: found.append(query)  # type: ignore[attr-defined]
    package = types.ModuleType("queries.dask")
    package.utils = stub  # type: ignore[attr-defined]
    sys.modules |= {"queries.dask": package, "queries.dask.utils": stub}
    for path in sorted((checkout / "queries" / "dask").glob("q*.py")):
        module = _loaded(path, f"polars_{path.stem}")

        def query(module: types.ModuleType = module) -> Any:
            # A query replaces its functions for tables by frames, so it is made anew each time.
            module.q()
            return found.pop()()

        yield f"polars {path.stem}", query


def _loaded(path: Path, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answered(client: Client, query: Query) -> tuple[float, Any]:
    """Return the seconds of a query and its answer."""
    began = time.perf_counter()
    answer = query()
    if is_dask_collection(answer):
        answer = answer.compute()
    seconds = time.perf_counter() - began
    idle(client)
    return seconds, answer


def differ(one: Any, other: Any) -> bool:
    """Return whether two answers differ beyond the order of rows and the last digits of sums."""
    if not isinstance(one, pd.DataFrame):
        return not math.isclose(float(one), float(other), rel_tol=1e-9)
    try:
        pd.testing.assert_frame_equal(_ordered(one), _ordered(other), rtol=1e-9)
    except AssertionError:
        return True
    return False


def _ordered(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.sort_values(list(frame.columns)).reset_index(drop=True)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--coiled", type=Path, metavar="DIR", help="checkout of coiled/benchmarks")
    parser.add_argument("--polars", type=Path, metavar="DIR", help="checkout of polars-benchmark")
    options = parser.parse_args()
    tables = make_tpch(options.scale)
    queries: list[tuple[str, Query]] = []
    if options.coiled:
        queries += coiled_queries(options.coiled, tables, options.scale)
    if options.polars:
        queries += polars_queries(options.polars, tables)
    queries = [one for one in queries if re.search(options.only or "", one[0])]
    if not queries:
        parser.error("no query: pass --coiled or --polars, and no other name in --only")
    timings = [Timing(name, 0) for name, _ in queries]
    with two_clusters() as sides:
        # The first round is not timed; it compares the answers.
        order = list(sides.both())
        for number in range(options.repeats + 1):
            for timing, (name, query) in zip(timings, queries, strict=True):
                answers = []
                for side, client in order:
                    # Queries ask for the default client, and so does the choice of p2p.
                    with client.as_current():
                        seconds, answer = answered(client, query)
                    answers.append(answer)
                    if number:
                        getattr(timing, f"{side}_s").append(seconds)
                if not number and differ(*answers):
                    raise SystemExit(f"{name}: the answers differ")
            order.reverse()
            print(f"  round {number}/{options.repeats}", file=sys.stderr, flush=True)
    for timing in timings:
        print(timing.line(), flush=True)
    stock, enabled = (
        sum(statistics.median(getattr(one, f"{side}_s")) for one in timings)
        for side in ("stock", "enabled")
    )
    print(f"all: stock {stock:.2f} s, gpurt {enabled:.2f} s, ratio {stock / enabled:.2f}")
    write_json(options.json, timings)


if __name__ == "__main__":
    main()
