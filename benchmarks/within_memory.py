"""The runtime's overhead where all data fits in memory, measured more finely than by `tiers`.

`benchmarks.tiers` has a row for this case, but its noise is larger than the overhead. Here all
clusters live at the same time and take turns in many short runs. So each run of one side has a
partner of the other. Besides wall time, processor seconds of the worker processes are measured,
because other processes change them far less.

The result is the median of the paired ratios, with an interval that contains the true median in 95
of 100 cases. The interval follows from order statistics (an inverted sign test), and assumes
nothing about the distribution of noise.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
from dask import delayed
from distributed import Client, wait

import dask_gpurt
from benchmarks.harness import arguments, idle, stock_client, write_json

LIMIT_NBYTES = 1_000_000_000
#: Probability with which an interval contains the true median.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Case:
    """A workload: `hold` prepares inputs once on each side, and `run` uses them many times."""

    name: str
    run: Callable[[Client, Any], Any]
    hold: Callable[[Client, float], Any]


@delayed(pure=False)
def _root(number: int) -> int:
    return number


@delayed(pure=False)
def _joined(*numbers: int) -> int:
    return sum(numbers)


def many_small(client: Client, n_tasks: int) -> Any:
    """Run three layers of tasks that do nothing, so that all time is overhead."""
    layer = [_root(n) for n in range(n_tasks // 2)]
    for _ in range(2):
        layer = [_joined(a, b) for a, b in zip(layer[::2], layer[1::2], strict=True)]
    return client.gather(client.compute(layer))


def held(client: Client, scale: float) -> Any:
    elements = 5_000_000
    x = da.random.default_rng(7).random(8 * elements, chunks=elements).reshape(-1, 50_000)
    x = client.persist(x)
    with client.as_current():
        wait(x)
    return x


def anomaly(client: Client, x: Any) -> Any:
    scores = (x - x.mean(0)) / x.std(0)
    return client.compute((scores**2).sum()).result()


CASES = [
    Case("small tasks", many_small, lambda client, scale: max(1, round(20 * scale)) * 8),
    Case("0.3 GB held", anomaly, held),
]
SIDES = {
    "stock": {"gpurt.enabled": False},
    "memory off": {"gpurt.memory.enabled": False},
    "enabled": {},
}


@contextlib.contextmanager
def clusters(sides: list[str]) -> Iterator[dict[str, Client]]:
    with contextlib.ExitStack() as stack:
        clients = {}
        for side in sides:
            client = stack.enter_context(stock_client(memory_limit=LIMIT_NBYTES))
            if side != "stock":
                with dask.config.set(SIDES[side]):
                    dask_gpurt.enable(client)
            clients[side] = client
        yield clients


def once(client: Client, case: Case, held_there: Any) -> dict[str, float]:
    """Run a case once, wait until the cluster is idle, and return the seconds."""
    before_s = client.run(time.process_time)
    own_s, began = time.process_time(), time.perf_counter()
    result = case.run(client, held_there)
    wall_s, own_s = time.perf_counter() - began, time.process_time() - own_s
    del result
    idle(client)
    after_s = client.run(time.process_time)
    return {
        "wall": wall_s,
        "worker processor": sum(after_s[worker] - before_s[worker] for worker in after_s),
        "scheduler and client processor": own_s,
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Return an interval for the true median; it is infinite if there are too few values."""
    n = len(values)
    beyond, k = 0.0, 0
    # The interval may leave out k - 1 values at each end.
    while k < n // 2:
        beyond += 2 * math.comb(n, k) / 2**n
        if beyond > 1 - CONFIDENCE:
            break
        k += 1
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)


def compared(case: Case, clients: dict[str, Client], options: argparse.Namespace) -> dict[str, Any]:
    inputs = {side: case.hold(client, options.scale) for side, client in clients.items()}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in clients}
    order = list(clients)
    for number in range(-2, options.repeats):
        for side in order:
            measured = once(clients[side], case, inputs[side])
            if number >= 0:
                runs[side].append(measured)
        order.append(order.pop(0))
        print(f"  {case.name}: {number + 1}/{options.repeats}", file=sys.stderr, flush=True)
    figures: dict[str, Any] = {}
    for side in clients:
        for what in runs[side][0] if side != "stock" else ():
            pairs = zip(runs[side], runs["stock"], strict=True)
            ratios = [ours[what] / stock[what] for ours, stock in pairs]
            low, high = interval(ratios)
            seconds = statistics.median(run[what] for run in runs["stock"])
            middle = statistics.median(ratios)
            figures[f"{side}: {what}"] = {"ratio": middle, "interval": [low, high]}
            print(
                f"{case.name:14} {side:10} {what:32} {middle:6.3f} of stock's {seconds:.3f} s"
                f"  ({low:.3f} to {high:.3f})",
                flush=True,
            )
    return {"figures": figures, "runs": runs}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(repeats=100)
    parser.add_argument(
        "--sides", nargs="+", choices=list(SIDES), default=["stock", "enabled"], help="sides to run"
    )
    options = parser.parse_args()
    with clusters(options.sides) as clients:
        reports = {
            case.name: compared(case, clients, options)
            for case in CASES
            if not options.only or options.only in case.name
        }
    write_json(options.json, [], cases=reports)


if __name__ == "__main__":
    main()
