"""Copies between host and device: pinned host memory against memory that is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.gpu.report import Row, Say
from benchmarks.gpu.timing import medians_s, open_device
from dask_gpurt.devices.cuda.driver import why_no_cuda
from dask_gpurt.devices.device import Device
from dask_gpurt.devices.host_memory.pinned import PinnedPool

NBYTES = 256 << 20
REPEATS = 7


def why_not() -> str:
    return why_no_cuda() or ""


def run(say: Say) -> None:
    device = open_device(2 * NBYTES)
    measure(device, device.driver.pin, NBYTES, REPEATS, say)
    device.close()


def measure(
    device: Device,
    pin: Callable[[int], np.ndarray],
    nbytes: int,
    repeats: int,
    say: Say,
) -> None:
    """Rates both ways, and that a pool of pinned blocks asks the system once."""
    stream = device.stream("copies")
    buffer = device.allocate(nbytes, stream)
    memory = {"pinned": pin(nbytes), "pageable": np.empty(nbytes, np.uint8)}
    for one in memory.values():
        one.fill(1)  # pages that were never touched would be made in the midst of a copy

    def copied(kind: str, way: str) -> Callable[[], None]:
        def copy() -> None:
            if way == "in":
                stream.to_device(buffer, memory[kind])
            else:
                stream.to_host(memory[kind], buffer)
            stream.synchronize()

        return copy

    for way, what in (("in", "host to device"), ("out", "device to host")):
        took_s = medians_s({kind: copied(kind, way) for kind in memory}, repeats)
        rates = {kind: nbytes / s / 1e9 for kind, s in took_s.items()}
        say(
            Row(
                f"copy, {what}",
                rates["pinned"],
                "GB/s",
                took_s["pinned"] / took_s["pageable"],
                "seconds pinned / seconds pageable",
                details={"nbytes": nbytes, "took_s": took_s, "gb_per_s": rates},
            )
        )
    pool = PinnedPool(nbytes, min(1 << 20, nbytes // 4), pin)
    pool.give_back(pool.take(nbytes // 2))
    n_warm = pool.n_allocations
    for _ in range(20):
        pool.give_back(pool.take(nbytes // 2))
    n_more = pool.n_allocations - n_warm
    say(Row("pinned pool, allocations after warm-up", n_more, "", target="0"))
    buffer.free(stream)
