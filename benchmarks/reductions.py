"""Reductions of arrays, stock Dask against the runtime: seconds, bytes over links, peak memory.

Cases with links run on network namespaces that stand for hosts (`benchmarks.hosts`). Two clusters
on the same hosts take turns; one of them has the runtime. The case `memory` runs on clusters of two
local workers with little memory, one after the other.

    python -m benchmarks.reductions
    python -m benchmarks.reductions --only small --repeats 20
    python -m benchmarks.reductions --only memory
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
from distributed import Client, wait

import dask_gpurt
from benchmarks.broadcast import received_nbytes
from benchmarks.harness import Sides, arguments, in_turns, settle, stock_client, write_json
from benchmarks.hosts import cluster, hosts, shape

N_HOSTS = 4
#: Memory of a worker in the case `memory`, and how long stock Dask may try.
LIMIT_NBYTES, LIMIT_S = 1_500_000_000, 600


@dataclass(frozen=True)
class Case:
    """A reduction of inputs that the workers hold.

    Attributes
    ----------
    chunks
        Lengths of a chunk at full scale. There is one chunk for each worker, along the first axis.
    target
        The most that the runtime may take, as a part of stock Dask's time.
    """

    name: str
    chunks: tuple[int, int]
    reduce: Callable[[Any], Any]
    target: float


CASES = [
    Case("centred: x - x.mean(0), 100 MB", (1, 12_500_000), lambda x: x - x.mean(0), 0.5),
    Case("gram: x.T @ x, 72 MB", (1000, 3000), lambda x: x.T @ x, 0.6),
    Case("deviation: x.std(0), 100 MB", (1, 12_500_000), lambda x: x.std(0), 0.6),
    Case("small: x.mean(0), 1 MB", (16, 125_000), lambda x: x.mean(0), 1.03),
]


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    """Return the most memory that this process has had since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not tell the peak of a process")


def held(client: Client, case: Case, scale: float) -> Any:
    """Return an array whose chunks are in the memory of the workers, one on each."""
    rows, columns = case.chunks
    columns = max(1, round(columns * scale))
    x = da.random.default_rng(1).random((N_HOSTS * rows, columns), chunks=(rows, columns))
    x = client.persist(x)
    with client.as_current():
        wait(x)
    return x


def once(client: Client, case: Case, x: Any) -> dict[str, Any]:
    """Run a reduction; return the seconds, the bytes of the busiest link, and the largest peak."""
    client.run(reset_peak)
    before = received_nbytes(N_HOSTS)
    began = time.perf_counter()
    result = client.persist(case.reduce(x))
    with client.as_current():
        wait(result)
    wall_s = time.perf_counter() - began
    links = [b - a for a, b in zip(before, received_nbytes(N_HOSTS), strict=True)]
    peak = max(client.run(peak_nbytes).values())
    del result
    settle(client)
    return {"wall_s": wall_s, "link_nbytes": max(links), "peak_nbytes": peak}


def compare(sides: Sides, case: Case, scale: float, repeats: int) -> dict[str, Any]:
    """Let both sides take turns with a case, and print what they took."""
    inputs = {side: held(client, case, scale) for side, client in sides.both()}

    def turn(side: str, client: Client) -> dict[str, Any]:
        return once(client, case, inputs[side])

    runs, median = in_turns(sides, repeats, turn, f"{case.name}: ")
    for side in runs:
        print(
            f"{case.name:32} {side:8} {median[side, 'wall_s']:7.3f} s"
            f"  {median[side, 'link_nbytes'] / 1e6:7.1f} MB into the busiest host"
            f"  peak {median[side, 'peak_nbytes'] / 1e6:6.0f} MB"
        )
    ratio = median["enabled", "wall_s"] / median["stock", "wall_s"]
    print(f"{case.name:32} ratio {ratio:.2f} (at most {case.target:g})", flush=True)
    inputs.clear()
    for _, client in sides.both():
        settle(client)
    return {"case": case.name, "ratio": ratio, "target": case.target, "runs": runs}


def in_little_memory(scale: float) -> dict[str, Any]:
    """Sum 32 rows of 160 MB on two workers of 1.5 GB, without and with the runtime."""
    found: dict[str, Any] = {"case": "memory"}
    for side in ("stock", "enabled"):
        with stock_client(2, int(LIMIT_NBYTES * scale)) as client:
            if side == "enabled":
                dask_gpurt.enable(client)
            client.run(reset_peak)
            began = time.perf_counter()
            future = client.compute(da.ones((32, int(2e7 * scale)), chunks=(1, -1)).sum(0).sum())
            try:
                ended = f"result {future.result(timeout=LIMIT_S):.0f}"
            except Exception as error:
                ended = f"no result: {type(error).__name__}"
            wait_s = time.perf_counter() - began
            peaks = list(client.run(peak_nbytes, on_error="ignore").values())
        found[side] = {"ended": ended, "wall_s": wait_s, "peak_nbytes": max(peaks, default=0)}
        print(
            f"memory {side:8} {wait_s:7.3f} s  peak {max(peaks, default=0) / 1e6:6.0f} MB, {ended}"
        )
    return found


def main() -> None:
    parser = arguments((__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rate", default="1600mbit", help="rate of each host's link")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only is None or options.only in case.name]
    found = []
    with contextlib.ExitStack() as stack:
        if cases:
            names = stack.enter_context(hosts(N_HOSTS))
            one, other = (stack.enter_context(cluster(names)) for _ in range(2))
            dask_gpurt.enable(other)
            shape(names, options.rate)
            for case in cases:
                found.append(compare(Sides(one, other), case, options.scale, options.repeats))
    if options.only is None or options.only in "memory":
        found.append(in_little_memory(options.scale))
    write_json(options.json, [], found=found, rate=options.rate, scale=options.scale)


if __name__ == "__main__":
    main()
