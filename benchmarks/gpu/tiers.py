"""Section that reads a working set of four times the device's budget, and one that fits.

When an allocation finds no room, the store moves values to pinned memory. It moves them back when
they are read. Each pass checks all values.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s, open_device
from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import why_no_cuda
from dask_gpurt.devices.device import Device
from dask_gpurt.devices.host_memory.pinned import PinnedPool
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.frames.flat.values import flatten, restore
from dask_gpurt.memory.decisions.eviction_policy import POLICIES
from dask_gpurt.memory.decisions.levels import Level
from dask_gpurt.memory.decisions.residency import Residency
from dask_gpurt.memory.device_values import device_packing, is_on_device
from dask_gpurt.memory.host_tiers import PinnedTier
from dask_gpurt.memory.store import TieredStore
from dask_gpurt.memory.tiers import Lanes, Packing

BUDGET_NBYTES, WORKING_NBYTES, VALUE_NBYTES = 2 << 30, 8 << 30, 64 << 20
PASSES = 2
_DEVICE = 1


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_no_cuda() or ""


def run(report: Report) -> None:
    """Run the section on the first GPU."""
    device = open_device(BUDGET_NBYTES)
    pool = PinnedPool(WORKING_NBYTES + VALUE_NBYTES, pin=device.driver.pin)
    n_few = BUDGET_NBYTES // VALUE_NBYTES // 2
    back = device.driver.pin(VALUE_NBYTES)
    fits = measure(device, pool, n_few, back, PASSES)
    n_many = WORKING_NBYTES // VALUE_NBYTES
    exceeds = measure(device, pool, n_many, back, PASSES)
    report(compare(fits, exceeds, n_many * VALUE_NBYTES))
    report(load_row(exceeds, pinned_copy_gb_per_s(device, back)))
    device.close()


def pinned_copy_gb_per_s(device: Device, pinned: np.ndarray) -> float:
    """Return the rate of plain copies from pinned memory to the device."""
    stream = device.stream("plain copies")
    target = device.allocate(pinned.nbytes, stream)

    def copy() -> None:
        stream.to_device(target, pinned)
        stream.synchronize()

    took_s = medians_s({"copy": copy}, 15)["copy"]
    target.free(stream)
    return pinned.nbytes / took_s / 1e9


def load_row(exceeds: dict[str, Any], plain_gb_per_s: float) -> Row:
    """Return a row that compares values loaded from the pinned tier with plain copies."""
    value_nbytes = exceeds["read_nbytes"] // exceeds["reads"]
    rate = value_nbytes / statistics.median(exceeds["load_s"]) / 1e9
    return Row(
        "values loaded from the pinned tier",
        rate,
        "GB/s",
        rate / plain_gb_per_s,
        "this / plain copies from pinned memory",
        ">= 0.9",
        details={"plain_gb_per_s": plain_gb_per_s, "loads": len(exceeds["load_s"])},
    )


def compare(fits: dict[str, Any], exceeds: dict[str, Any], nbytes: int) -> Row:
    """Return a row that compares two results of `measure`."""
    rates = [result["read_nbytes"] / result["read_s"] / 1e9 for result in (fits, exceeds)]
    return Row(
        "values over 4x the device's budget",
        rates[1],
        "GB/s read",
        rates[0] / rates[1],
        "seconds a byte, 4x the budget / seconds a byte, half of it",
        "finishes, nothing wrong, no pinned allocation after the first pass",
        details={"working_nbytes": nbytes, "fits": fits, "exceeds": exceeds},
    )


def measure(
    device: Device, pool: PinnedPool, n_values: int, back: np.ndarray, passes: int
) -> dict[str, Any]:
    """Make values, read all of them in several passes, and check each of them.

    Parameters
    ----------
    back
        Host memory of the size of a value.
    """
    value_nbytes = back.nbytes
    levels = [
        Level("memory"),
        Level("device", device.capacity_nbytes),
        Level("pinned", pool.capacity_nbytes),
    ]
    compute = device.stream("compute")
    most_nbytes = 0
    wrong: list[int] = []

    def values_of(number: int) -> np.ndarray:
        return np.full(value_nbytes, number % 251, np.uint8)

    with Lane("write") as write, Lane("read") as read, Lane("owner") as owner:
        store = TieredStore(
            Residency(levels, {0: (), _DEVICE: (2,)}, POLICIES["lru"]),
            [PinnedTier(pool)],
            [Packing(lambda value: int(value.nbytes), flatten, restore), device_packing(device)],
            Lanes(*(_calls_on(lane) for lane in (write, read, owner, owner))),
            top_level_of=lambda value: _DEVICE if is_on_device(value) else 0,
        )
        device.on_full(lambda nbytes: store.make_room(_DEVICE, nbytes))
        began = time.perf_counter()
        for number in range(n_values):
            array = DeviceArray.from_host(values_of(number), device, compute)
            array.ready.synchronize()
            store[number] = array
            del array
            most_nbytes = max(most_nbytes, device.used_nbytes)
        made_s = time.perf_counter() - began
        n_allocations: list[int] = []
        load_s: list[float] = []
        read_s = 0.0
        for _ in range(passes):
            for number in range(n_values):
                is_loaded = store.is_spilled(number)
                began = time.perf_counter()
                array = store[number]
                array.ready.synchronize()
                if is_loaded:
                    load_s.append(time.perf_counter() - began)
                _, copied = array.to_host(compute, back)
                copied.synchronize()
                read_s += time.perf_counter() - began
                del array, copied
                most_nbytes = max(most_nbytes, device.used_nbytes)
                # A check of all bytes would take longer than the copies.
                if not (back[:: 1 << 12] == number % 251).all():
                    wrong.append(number)
            n_allocations.append(pool.n_allocations)
        n_cold = sum(store.is_spilled(number) for number in range(n_values))
        store.close()
    device.on_full(None)
    gc.collect()
    return {
        "values": n_values,
        "made_s": made_s,
        "read_s": read_s,
        "reads": passes * n_values,
        "load_s": load_s,
        "read_nbytes": passes * n_values * value_nbytes,
        "cold_at_the_end": n_cold,
        "most_used_nbytes": most_nbytes,
        "capacity_nbytes": device.capacity_nbytes,
        "wrong": wrong,
        "pinned_allocations": n_allocations,
    }


def _calls_on(lane: Lane) -> Callable[..., Any]:
    return lambda call, path="", nbytes=0: lane.submit(call)
