"""The memory of a worker's process, in parts that add up to its resident bytes.

Runs on any worker that has this package, with the runtime on or off. The kernel tells how many of
the resident bytes are private, shared or of files. Owners in the process tell what they hold. The
rest is Python's: modules, objects that tasks keep, and what running tasks use.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

from dask.utils import key_split

from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.system_calls import allocator_nbytes, resident_nbytes

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

#: Parts of the resident bytes, in the order in which they are shown, and what would free them.
PARTS: dict[str, tuple[str, str]] = {
    "outputs": (
        "task outputs",
        "release futures and collections; with a memory limit they spill to disk",
    ),
    "shards": (
        "shards of shuffles",
        "they leave as output partitions are made; a lower gpurt.shuffle.memory spills more",
    ),
    "in_flight": (
        "messages being sent",
        "they leave as peers take them; gpurt.shuffle.in-flight bounds them",
    ),
    "pool_rest": (
        "other pages of the pools in use",
        "they leave with the outputs and shards that share them",
    ),
    "idle_pool": ("warm pools", "freed a minute after the last shuffle"),
    "shared": (
        "memory shared with other processes",
        "freed with the messages of peers, or by the program that shares it",
    ),
    "allocator": (
        "free pages of the allocator",
        "client.run(malloc_trim), or MALLOC_TRIM_THRESHOLD_ as workers start: see Dask's page on "
        "worker memory",
    ),
    "files": ("code and mapped files", "the kernel drops these pages when it needs memory"),
    "rest": (
        "Python, its libraries, and running tasks",
        "what tasks keep in modules or caches stays until client.restart()",
    ),
    "overlap": (
        "counted above, but not resident",
        "nothing to free: values share memory, or were never written",
    ),
}
#: Most task prefixes that are named.
MAX_PREFIXES = 5
#: Most values that are looked at.
MAX_VALUES = 200_000


def memory_parts(dask_worker: Worker) -> dict[str, Any]:
    """Return what takes the memory of a worker's process. Runs on the worker.

    Returns
    -------
    dict
        `resident_nbytes`; `parts`, whose sum it is; `levels` of the store of task outputs; the
        largest `prefixes` of keys in memory; `on_disk_nbytes`; `limit_nbytes`; the `pid` of the
        process; and whether the runtime is on here (`active`).
    """
    runtime: WorkerRuntime | None = dask_worker.extensions.get(NAME)
    is_active = runtime is not None and runtime.is_attached
    resident = resident_nbytes()
    levels = _levels(dask_worker)
    parts: dict[str, int] = {
        "outputs": sum(one["nbytes"] for one in levels if one["in_memory"]),
        "files": resident["files"],
    }
    shared, pool_nbytes = resident["shared"], 0
    if runtime is not None:
        parts |= _of_runtime(runtime, parts["outputs"], shared)
        pool_nbytes = runtime.pool.used_nbytes + runtime.pool.idle_nbytes
    used_nbytes, free_nbytes = allocator_nbytes()
    # Free bytes whose pages went back to the system are not resident.
    most_nbytes = resident["anonymous"] - used_nbytes - pool_nbytes
    parts["allocator"] = max(0, min(free_nbytes, most_nbytes))
    # The rest of the shared bytes belongs to peers, or to other programs.
    outgoing = parts.pop("outgoing", 0)
    parts["shared"] = max(0, shared - outgoing)
    rest = resident["all"] - sum(parts.values())
    parts["rest"], parts["overlap"] = max(rest, 0), min(rest, 0)
    return {
        "pid": os.getpid(),
        "active": is_active,
        "resident_nbytes": resident["all"],
        "limit_nbytes": dask_worker.memory_manager.memory_limit,
        "parts": {name: parts.get(name, 0) for name in PARTS},
        "levels": levels,
        "prefixes": _prefixes(dask_worker),
        "on_disk_nbytes": sum(one["nbytes"] for one in levels if one["name"] == "disk")
        + (runtime.shards_on_disk_nbytes() if runtime is not None else 0),
        "tasks_running": dask_worker.state.executing_count,
    }


def _of_runtime(runtime: WorkerRuntime, outputs: int, shared: int) -> dict[str, int]:
    """Return the parts that belong to shuffles; `outgoing` are those in shared memory."""
    outgoing = runtime.links.outgoing
    shards = runtime.shards_nbytes() - outgoing.used_nbytes
    # Pages of a file in memory are resident once they were written.
    in_flight = min(outgoing.used_nbytes, shared)
    outgoing_idle = min(outgoing.idle_nbytes, shared - in_flight)
    # Outputs of shuffles may be in pages of the pool, and are counted as outputs.
    rest = max(0, runtime.pool.used_nbytes - shards - outputs)
    return {
        "shards": shards,
        "in_flight": in_flight,
        "pool_rest": rest,
        "idle_pool": runtime.pool.idle_nbytes + outgoing_idle,
        "outgoing": in_flight + outgoing_idle,
    }


def _levels(dask_worker: Worker) -> list[dict[str, Any]]:
    """Return the bytes of task outputs by tier, of our store or of Dask's."""
    store: Any = dask_worker.data
    if hasattr(store, "report"):
        return [
            {
                "name": level["name"],
                "nbytes": level["used_nbytes"],
                "values": level["values"],
                "in_memory": level["name"] in ("memory", "pinned", "compressed"),
            }
            for level in store.report()["levels"]
        ]
    fast = getattr(store, "fast", store)
    weight = getattr(fast, "total_weight", None)
    if weight is None:
        tasks = dask_worker.state.tasks
        weight = sum(tasks[key].get_nbytes() for key in list(fast) if key in tasks)
    spilled = getattr(store, "spilled_total", None)
    found = [{"name": "memory", "nbytes": int(weight), "values": len(fast), "in_memory": True}]
    if spilled is not None:
        n = len(store.slow)
        found.append({"name": "disk", "nbytes": spilled.disk, "values": n, "in_memory": False})
    return found


def _prefixes(dask_worker: Worker) -> list[tuple[str, int, int]]:
    """Return the prefixes of keys whose outputs take most: name, bytes, number."""
    nbytes: Counter[str] = Counter()
    values: Counter[str] = Counter()
    tasks = dask_worker.state.tasks
    for key in islice(list(dask_worker.data), MAX_VALUES):
        if (task := tasks.get(key)) is not None:
            prefix = key_split(key)
            nbytes[prefix] += task.get_nbytes()
            values[prefix] += 1
    return [(name, n, values[name]) for name, n in nbytes.most_common(MAX_PREFIXES)]
