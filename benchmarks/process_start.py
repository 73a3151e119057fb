"""Processor seconds that processes have taken when a cluster is ready, stock against the runtime.

Each run starts a cluster in a fresh interpreter, in an empty folder. *A worker* is a process of its
own. *All in one* is a client with scheduler and worker in its process.

    python -m benchmarks.process_start --repeats 9
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import arguments, write_json

PROGRAMS = {
    "a worker": """
import time
from distributed import Client, LocalCluster
if __name__ == "__main__":
    with LocalCluster(n_workers=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        print(*client.run(time.process_time).values())
""",
    "all in one": """
import time
from distributed import Client
client = Client(processes=False, n_workers=1, dashboard_address=":0")
print(time.process_time())
client.close()
""",
}


def seconds(program: str, is_enabled: bool) -> float:
    """Return what the program prints."""
    env = {**os.environ, "DASK_GPURT__ENABLED": str(is_enabled)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        command = [sys.executable, str(path)]
        done = subprocess.run(
            command, cwd=folder, env=env, check=True, capture_output=True, text=True
        )
    return float(done.stdout)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = []
    for name, program in PROGRAMS.items():
        taken: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(options.repeats):
            for is_enabled in (False, True) if repeat % 2 else (True, False):
                taken[is_enabled].append(seconds(program, is_enabled))
        stock_s, enabled_s = statistics.median(taken[False]), statistics.median(taken[True])
        print(f"{name:12} stock {stock_s:.2f} s  gpurt {enabled_s:.2f} s")
        rows.append({"name": name, "stock_s": stock_s, "enabled_s": enabled_s})
    write_json(options.json, [], starts=rows)


if __name__ == "__main__":
    main()
