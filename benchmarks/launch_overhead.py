"""Time that the launch hook adds to a kernel launch, measured with fake drivers and without a GPU.

A launch reaches the hook in one of two ways:

- *by itself*: a program calls `LaunchHook.launch`, and the driver is a Python object.
- *by CuPy*: CuPy calls the function that replaces `cuLaunchKernel`. The driver is a library with
  C's calling convention, so the added time includes the call from C to Python and back.

Each way is timed without the hook, and with the hook in three modes: outside of `shaped`, inside it
with no communication pending, and inside it with communication pending. The time without the hook
is subtracted from the others.

    python -m benchmarks.launch_overhead --repeats 15
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from benchmarks.harness import arguments, write_json
from dask_gpurt.devices.occupancy.architectures import SM90
from dask_gpurt.devices.occupancy.launches import Launches
from dask_gpurt.devices.occupancy.shaping import (
    Extent,
    KernelAttributes,
    LaunchHook,
    Planner,
    shaped,
)

N_LAUNCHES = 20_000
TARGET_US = 3.0
THREADS = 256
#: Whether communication is pending in each mode; None is outside of `shaped`.
PENDING: dict[str, bool | None] = {"outside": None, "nothing pending": False, "shaped": True}

INT, UINT, POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(INT, POINTER, *[UINT] * 7, POINTER, POINTER, POINTER)
MAX_THREADS, REGISTERS = 0, 4


class Driver:
    """A fake driver whose launches do nothing."""

    def attributes(self, kernel: Hashable) -> KernelAttributes:
        return KernelAttributes(32, 0, 1024, 48 << 10)

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        pass

    def set_max_dynamic_shared(self, kernel: Hashable, nbytes: int) -> None:
        pass


class Library:
    """A fake driver with the functions of `libcuda`, to be called from C.

    A launch may call two of them. Both are the C function `abs` here, which returns its argument 0,
    the status of success. Written in Python they would take longer than the measured time.
    """

    def __init__(self) -> None:
        at_once = ctypes.CDLL(None).abs
        get = ctypes.CFUNCTYPE(INT, ctypes.POINTER(INT), INT, POINTER)
        self.cuLaunchKernel = self.cuStreamIsCapturing = at_once
        self.cuModuleUnload = ctypes.CFUNCTYPE(INT, POINTER)(lambda module: 0)
        self.cuFuncGetAttribute = get(self._attribute)
        self.cuFuncSetAttribute = ctypes.CFUNCTYPE(INT, POINTER, INT, INT)(lambda *_: 0)

    def _attribute(self, value: Any, attribute: int, kernel: int | None) -> int:
        value[0] = {MAX_THREADS: 1024, REGISTERS: 32}.get(attribute, 0)
        return 0


#: Launches a kernel once.
Launch = Callable[[], object]
#: The only kernel there is, and its shape.
KERNEL, BLOCK = None, (THREADS, 1, 1)


def by_itself() -> tuple[LaunchHook, Launch, Launch]:
    """Return the hook, and a program's launch without it and with it."""
    driver = Driver()
    hook = LaunchHook(driver, enabled=True)
    grid = (1, 1, 1)
    return (
        hook,
        lambda: driver.launch(KERNEL, grid, BLOCK, 0, None),
        lambda: hook.launch(KERNEL, grid, BLOCK, 0, None),
    )


def by_cupy() -> tuple[LaunchHook, Launch, Launch]:
    """Return the hook, and launches as CuPy makes them: it calls the address of a function."""
    library = Library()
    plain = LAUNCH(ctypes.cast(library.cuLaunchKernel, POINTER).value or 0)
    launches = Launches(library)
    hook = launches.hook = LaunchHook(launches, enabled=True)
    launches.intercept(library)
    hooked = LAUNCH(ctypes.cast(library.cuLaunchKernel, POINTER).value or 0)
    launch = KERNEL, 1, 1, 1, *BLOCK, 0, None, None, None
    return hook, lambda: plain(*launch), lambda: hooked(*launch)


def took_us(launch: Launch) -> float:
    """Return the mean microseconds of a launch, over many in a row."""
    began = time.perf_counter()
    for _ in range(N_LAUNCHES):
        launch()
    return (time.perf_counter() - began) / N_LAUNCHES * 1e6


def measure(way: Callable[[], tuple[LaunchHook, Launch, Launch]], repeats: int) -> dict[str, float]:
    """Return median microseconds of a launch without the hook, and those that each mode adds."""
    hook, plain, hooked = way()
    planner = Planner(SM90, leave=2)
    plain_us: list[float] = []
    more_us: dict[str, list[float]] = {mode: [] for mode in PENDING}
    for _ in range(repeats + 1):
        least_us = took_us(plain)
        plain_us.append(least_us)
        for mode, pending in PENDING.items():
            with contextlib.ExitStack() as entered:
                if pending is not None:
                    entered.enter_context(shaped(planner, partial(bool, pending), hook))
                more_us[mode].append(took_us(hooked) - least_us)
                # Check that the timed launches were in this mode.
                is_shaped = hook.dynamic_nbytes(KERNEL, BLOCK, 0) > 0
                assert is_shaped == bool(pending), (mode, hook.decisions())
    # The first series is dropped, because the hook made its decisions there.
    found = {mode: statistics.median(all_[1:]) for mode, all_ in more_us.items()}
    return {"no hook": statistics.median(plain_us[1:]), **found}


def main() -> None:
    options = arguments((__doc__ or "").splitlines()[0]).parse_args()
    rows = []
    print(f"microseconds that the hook adds to a launch (under {TARGET_US:g} wanted)")
    for name, way in {"by itself": by_itself, "by CuPy": by_cupy}.items():
        row = measure(way, options.repeats)
        rows.append({"launches": name, **row})
        added = "  ".join(f"{mode} +{row[mode]:.2f}" for mode in PENDING)
        print(f"  {name:10} no hook {row['no hook']:.2f}  {added}", flush=True)
    write_json(options.json, [], launch_overhead=rows)


if __name__ == "__main__":
    main()
