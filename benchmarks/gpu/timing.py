"""Timing of alternatives that take turns, and the device that they run on."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping

from dask_gpurt.devices.cuda.driver import CupyDriver, why_no_cuda
from dask_gpurt.devices.cuda.gpu import CudaDevice


def why_skipped(*modules: str) -> str:
    """Return why a section that needs a GPU and these modules cannot run; empty if it can."""
    if (reason := why_no_cuda()) is not None:
        return reason
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} cannot be imported: {error}"
    return ""


def medians_s(
    sides: Mapping[str, Callable[[], None]],
    repeats: int,
    before: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the median time of each side.

    Each side first runs once without timing. Then the sides take turns, in alternating order. A
    side must return only after all of its work is done, including work on the device.

    Parameters
    ----------
    before
        Called before each timing.
    """
    took_s: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    for number in range(repeats):
        for name, side in list(sides.items())[:: 1 if number % 2 == 0 else -1]:
            before()
            began = time.perf_counter()
            side()
            took_s[name].append(time.perf_counter() - began)
    return {name: statistics.median(all_s) for name, all_s in took_s.items()}


def open_device(capacity_nbytes: int) -> CudaDevice:
    """Open the first GPU, with this capacity."""
    return CudaDevice(CupyDriver(), capacity_nbytes)


def copy_gb_per_s(nbytes: int = 1 << 30) -> float:
    """Return the rate of copies within the device."""
    import cupy

    source, target = (cupy.ones(nbytes, cupy.uint8) for _ in range(2))

    def copy() -> None:
        for _ in range(8):
            target.data.copy_from_device_async(source.data, nbytes, cupy.cuda.Stream.null)
        cupy.cuda.Stream.null.synchronize()

    return 8 * nbytes / medians_s({"copy": copy}, 5)["copy"] / 1e9
