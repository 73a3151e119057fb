"""Small clusters with more data than memory, and views into their workers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

import dask_gpurt
from tests.failure.gates import DEADLINE_S, pass_gate
from tests.failure.stage import NEVER_GIVE_UP
from tests.memory.faulty_system import System

MIB = 1 << 20
BLOCK_NBYTES = 2 * MIB
N_BLOCKS = 40
MEMORY_NBYTES = 32 * MIB

#: Limits on the memory of the whole process are off. Several workers share one process, or the
#: libraries that a worker imports are larger than its values.
SETTINGS = NEVER_GIVE_UP | {
    "gpurt.enabled": False,
    "distributed.worker.memory.target": 0.6,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


@contextlib.contextmanager
def open_small(
    directory: Path, *, processes: bool = False, n_workers: int = 2, threads: int = 1, **config: Any
) -> Iterator[Client]:
    """Start workers that hold 19 MiB of values in memory each, with the runtime on."""
    kind: dict[str, Any] = {"processes": processes, "silence_logs": 50 if processes else False}
    if not processes:
        kind["protocol"] = "tcp://"
    with (
        dask.config.set(SETTINGS | {"temporary-directory": str(directory)} | config),
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=threads,
            memory_limit=MEMORY_NBYTES,
            dashboard_address=":0",
            **kind,
        ) as cluster,
        Client(cluster) as client,
    ):
        dask_gpurt.enable(client)
        yield client


def make_block(number: int, nbytes: int = BLOCK_NBYTES) -> np.ndarray:
    """Return a block that differs for each number, with different items."""
    return np.random.default_rng(number).integers(0, 1 << 40, nbytes // 8)


def sum_of(block: np.ndarray) -> int:
    return int(block.sum())


def expected_sums(n_blocks: int = N_BLOCKS) -> list[int]:
    return [sum_of(make_block(number)) for number in range(n_blocks)]


def make_blocks(client: Client, n_blocks: int = N_BLOCKS, **options: Any) -> list[Any]:
    """Return futures of more blocks than the workers hold in memory."""
    return client.map(make_block, range(n_blocks), **options)


def sums_of(client: Client, blocks: list[Any], **options: Any) -> list[int]:
    futures = client.map(sum_of, blocks, pure=False, **options)
    return list(client.gather(futures))


def store_of(dask_worker: Any) -> Any:
    return dask_worker.data


def disk_of(dask_worker: Any) -> Any:
    """Return the disk tier of a worker."""
    return next(tier for tier in dask_worker.data._carrier._tiers.values() if tier.name == "disk")


def stores(client: Client) -> list[Any]:
    """Return the stores of the workers of this process."""
    return [worker.data for worker in client.cluster.workers.values()]


def have_calls_pass(dask_worker: Any, **hooks: Callable[..., Any]) -> None:
    """Let the disk tier call the system through hooks (`tests.memory.faulty_system`)."""
    tier = disk_of(dask_worker)
    tier._files._system = tier._directory._system = System(**hooks)


def hold_a_call(dask_worker: Any, name: str, path: str) -> None:
    """Make a worker's disk tier stop at a gate before each system call of this name."""

    def held(real: Any, *args: Any, **kwargs: Any) -> Any:
        pass_gate(path)
        return real(*args, **kwargs)

    have_calls_pass(dask_worker, **{name: held})


def hold_after_the_write(dask_worker: Any, path: str) -> None:
    """Make a worker stop when a value is in its file, but not yet recorded in the store."""
    tier = disk_of(dask_worker)
    put = tier.put

    def held(flat: Any) -> Any:
        place = put(flat)
        pass_gate(path)
        return place

    tier.put = held


def orphans(directory: Path) -> list[str]:
    """List value directories of dead processes in a directory, and lock files without one."""
    found = []
    # Unlike a glob, this does not fail if a file disappears meanwhile.
    paths = [Path(at, name) for at, ds, fs in os.walk(directory) for name in (*ds, *fs)]
    for path in paths:
        if not path.name.startswith("dask-gpurt-values-"):
            continue
        if path.suffix == ".lock":
            if _is_unlocked(path):
                found.append(str(path))
        elif path.is_dir() and not path.with_name(path.name + ".lock").exists():
            found.append(str(path))
    return found


def _is_unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def values_left_on(dask_worker: Any) -> list[str]:
    """Describe values that a worker holds and room that it has reserved."""
    store = dask_worker.data
    with store._lock:
        found = [f"value {key!r}" for key in store]
        found += [f"object of {key!r}" for key in store._carrier.objects]
        found += [f"copy of {serial} at level {level}" for serial, level in store._carrier._places]
        found += [f"send buffer of {serial}" for serial in store._send_buffers._buffers]
        found += [f"claim of {claim.name!r}" for claim in store.admission._waiting]
        found += [f"claim of {claim.name!r}" for claim in store.admission.running]
        for level in store.residency.levels:
            for amount in ("used_nbytes", "reserved_nbytes", "leaving_nbytes"):
                if getattr(level, amount):
                    found.append(f"{getattr(level, amount)} {amount} of {level.name}")
            found += [f"member {key!r} of {level.name}" for key in level.members]
        if store.residency.is_writing or store.residency._loads:
            found.append("moves under way")
        found += [
            f"{tier.used_nbytes} bytes of {tier.name}"
            for tier in store._carrier._tiers.values()
            if tier.used_nbytes
        ]
    tier = disk_of(dask_worker)
    if tier._directory._path is not None and os.path.isdir(tier._directory._path):
        found += [f"file {name}" for name in os.listdir(tier._directory._path)]
    return found


def assert_no_values_left(client: Client) -> None:
    """Return once workers hold no values; release messages may take a while to arrive."""
    give_up = time.monotonic() + DEADLINE_S
    while left := {
        address: found for address, found in client.run(values_left_on).items() if found
    }:
        assert time.monotonic() < give_up, f"left behind: {left}"
