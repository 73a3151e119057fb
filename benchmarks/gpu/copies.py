"""Section that copies between host and device, with pinned and with pageable host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s, open_device
from dask_gpurt.devices.cuda.driver import why_no_cuda
from dask_gpurt.devices.device import Device
from dask_gpurt.devices.host_memory.pinned import PinnedPool

NBYTES = 256 << 20
REPEATS = 7


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_no_cuda() or ""


def run(report: Report) -> None:
    """Run the section on the first GPU."""
    device = open_device(2 * NBYTES)
    measure(device, device.driver.pin, NBYTES, REPEATS, report)
    device.close()


def measure(
    device: Device,
    pin: Callable[[int], np.ndarray],
    nbytes: int,
    repeats: int,
    report: Report,
) -> None:
    """Report the rates of copies in both directions, and the allocations of a warm pinned pool."""
    stream = device.stream("copies")
    buffer = device.allocate(nbytes, stream)
    memory = {"pinned": pin(nbytes), "pageable": np.empty(nbytes, np.uint8)}
    for array in memory.values():
        array.fill(1)  # otherwise the first copy would also allocate the pages

    def copier(kind: str, direction: str) -> Callable[[], None]:
        def copy() -> None:
            if direction == "in":
                stream.to_device(buffer, memory[kind])
            else:
                stream.to_host(memory[kind], buffer)
            stream.synchronize()

        return copy

    for direction, name in (("in", "host to device"), ("out", "device to host")):
        took_s = medians_s({kind: copier(kind, direction) for kind in memory}, repeats)
        rates = {kind: nbytes / s / 1e9 for kind, s in took_s.items()}
        report(
            Row(
                f"copy, {name}",
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
    n_allocations = pool.n_allocations - n_warm
    report(Row("pinned pool, allocations after warm-up", n_allocations, "", target="0"))
    buffer.free(stream)
