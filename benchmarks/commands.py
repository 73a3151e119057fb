"""Seconds that `doctor`, `status` and `topology` take on a cluster of many workers that speaks TLS.

The scheduler has a process of its own, and so have fifty workers each. Each command runs as a user
runs it: a new process, from its start to its end. Last come the bytes and seconds of the reports of
1,000 workers (`benchmarks.thousand_reports`).

    python -m benchmarks.commands --workers 200 --repeats 5
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed import Client, Scheduler, Worker
from distributed.security import Security

import dask_gpurt
from benchmarks.harness import arguments, write_json
from benchmarks.thousand_reports import rows_of_reports

#: Longest median that is wanted.
TARGET_S = 3.0
PER_PROCESS = 50
COMMANDS = ("doctor", "status", "topology")
_SERVER = "--serve"


def security(folder: Path) -> Security:
    """Return the keys in a folder, for every role."""
    files = {
        f"tls_{role}_{kind}": str(folder / kind)
        for role in ("client", "scheduler", "worker")
        for kind in ("cert", "key")
    }
    return Security(tls_ca_file=str(folder / "ca"), require_encryption=True, **files)


def write_keys(folder: Path) -> None:
    made = Security.temporary()
    texts = {"ca": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for name, text in texts.items():
        (folder / name).write_text(str(text))


async def serve(folder: Path, scheduler: str, n_workers: int) -> None:
    """Run a scheduler, or workers if there is a scheduler already, until standard input ends."""
    keys = security(folder)
    async with contextlib.AsyncExitStack() as stack:
        if not scheduler:
            made = Scheduler(host="tls://127.0.0.1", port=0, dashboard=False, security=keys)
            address = (await stack.enter_async_context(made)).address
        else:
            workers = [
                Worker(scheduler, nthreads=1, security=keys, memory_limit="1 GiB", dashboard=False)
                for _ in range(n_workers)
            ]
            await asyncio.gather(*(stack.enter_async_context(one) for one in workers))
            address = scheduler
        print(address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextlib.contextmanager
def process(folder: Path, scheduler: str, n_workers: int) -> Iterator[str]:
    """Run `serve` in a process of its own; yield the scheduler's address."""
    command = [sys.executable, "-m", "benchmarks.commands", _SERVER]
    running = subprocess.Popen(
        [*command, str(folder), scheduler, str(n_workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdin is not None and running.stdout is not None
    try:
        address = running.stdout.readline().strip()
        if not address:
            raise RuntimeError("a process of the cluster did not start")
        yield address
    finally:
        running.stdin.close()
        running.wait()


def seconds_of(command: str, address: str, folder: Path) -> float:
    """Run a command once; return its seconds."""
    keys = [f"--tls-ca-file={folder / 'ca'}"]
    keys += [f"--tls-{kind}={folder / kind}" for kind in ("cert", "key")]
    program = "from dask.__main__ import main; main()"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, "gpurt", command, "--scheduler", address, *keys],
        capture_output=True,
        text=True,
        check=False,
    )
    elapsed_s = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr}")
    return elapsed_s


def main() -> None:
    parser = arguments((__doc__ or "").replace("\n", " "))
    parser.add_argument("--workers", type=int, default=200)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_keys(folder)
        address = stack.enter_context(process(folder, "", 0))
        for first in range(0, options.workers, PER_PROCESS):
            n = min(PER_PROCESS, options.workers - first)
            stack.enter_context(process(folder, address, n))
        client = stack.enter_context(Client(address, security=security(folder)))
        client.wait_for_workers(options.workers)
        dask_gpurt.enable(client)
        while len(dask_gpurt.status(client)["workers"]) < options.workers:
            pass
        for command in COMMANDS:
            seconds = [seconds_of(command, address, folder) for _ in range(options.repeats)]
            median_s = statistics.median(seconds)
            rows.append({"command": command, "workers": options.workers, "seconds": seconds})
            print(f"{command:10} {median_s:5.2f} s (at most {TARGET_S:g})", flush=True)
    logging.disable(logging.WARNING)
    write_json(options.json, [], commands=rows, reports=rows_of_reports(options.repeats))


if __name__ == "__main__":
    if _SERVER in sys.argv:
        logging.disable(logging.WARNING)
        where, scheduler_address, count = sys.argv[-3:]
        asyncio.run(serve(Path(where), scheduler_address, int(count)))
    else:
        main()
