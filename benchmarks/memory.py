"""Peak memory of a worker while it shuffles 1 GB, stock against the runtime.

The input is in memory before, or is made on the way. Outputs stay in memory, as after `persist`.
The peak is the kernel's high-water mark of each worker process (`VmHWM`), so that no short peak is
missed. It is reset at the start of the run. Each run has a fresh cluster, because processes tend to
keep memory that they once had.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import dask
from distributed import Client, LocalCluster, wait

import dask_gpurt
from benchmarks.harness import arguments, write_json
from benchmarks.shuffle import frame, numbers_part


def reset_peak() -> int:
    """Reset the high-water mark, and return the bytes of memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} here")


def once(enabled: bool, rows: int, hold_input: bool) -> float:
    """Run one shuffle; return the largest growth of a worker's memory in bytes."""
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(silence_logs=50, **options) as cluster, Client(cluster) as client:
        if enabled:
            dask_gpurt.enable(client)
        # A small shuffle loads the code, whose memory is not to be measured.
        frame(numbers_part, 2, 1000)[0].shuffle("key").n.sum().compute()
        (data,) = frame(numbers_part, 32, rows)
        if hold_input:
            data = data.persist()
            wait(data)
        before = client.run(reset_peak)
        result = data.shuffle("key").persist()
        wait(result)
        after = client.run(peak)
        return float(max(after[worker] - before[worker] for worker in after))


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    rows = int(1_000_000 * options.scale)
    report = {}
    with dask.config.set({"gpurt.enabled": False, "dataframe.shuffle.method": "p2p"}):
        for hold_input in (False, True):
            name = "input held" if hold_input else "input made on the way"
            peaks: dict[str, list[float]] = {"stock": [], "enabled": []}
            for number in range(options.repeats):
                sides = [("stock", False), ("enabled", True)]
                for side, enabled in sides if number % 2 == 0 else sides[::-1]:
                    peaks[side].append(once(enabled, rows, hold_input))
                print(f"  {name}: {number + 1}/{options.repeats}", file=sys.stderr, flush=True)
            stock, ours = (statistics.median(peaks[side]) for side in ("stock", "enabled"))
            print(
                f"{name:24} peak growth of a worker: stock {stock / 2**20:6.0f} MiB  "
                f"gpurt {ours / 2**20:6.0f} MiB  ratio {ours / stock:.2f} (below 1)",
                flush=True,
            )
            report[name] = {**peaks, "ratio": ours / stock}
    write_json(options.json, [], peaks_nbytes=report)


if __name__ == "__main__":
    main()
