"""What the launch hook adds to a launch, with drivers that are fakes: no GPU is needed.

Two ways lead through the hook. A program that launches by itself calls `LaunchHook.launch`, and the
driver is a Python object. CuPy calls the function that was put in the place of `cuLaunchKernel`:
there the driver is a library with C's calling convention, and what is added has the way from C to
Python in it, and back. Either is timed without the hook, outside of `shaped`, within it while no
communication is pending, and while some is; the first is taken off from the others.

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
#: The modes, and whether communication is pending; None where nothing is to be shaped.
PENDING: dict[str, bool | None] = {"outside": None, "nothing pending": False, "shaped": True}

INT, UINT, POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(INT, POINTER, *[UINT] * 7, POINTER, POINTER, POINTER)
MAX_THREADS, REGISTERS = 0, 4


class Driver:
    """Makes no launch."""

    def attributes(self, kernel: Hashable) -> KernelAttributes:
        return KernelAttributes(32, 0, 1024, 48 << 10)

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        pass

    def set_max_dynamic_shared(self, kernel: Hashable, nbytes: int) -> None:
        pass


class Library:
    """The same with the functions of `libcuda`, to be called from C.

    The two that each launch may call are a function of C's that returns at once: the status is its
    first argument, and that is 0. In Python they would take longer than what is measured.
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


#: Launches once.
Launch = Callable[[], object]
#: The only kernel there is, and its shape.
KERNEL, BLOCK = None, (THREADS, 1, 1)


def by_itself() -> tuple[LaunchHook, Launch, Launch]:
    """A program's launches: the hook, without it, with it."""
    driver = Driver()
    hook = LaunchHook(driver, enabled=True)
    grid = (1, 1, 1)
    return (
        hook,
        lambda: driver.launch(KERNEL, grid, BLOCK, 0, None),
        lambda: hook.launch(KERNEL, grid, BLOCK, 0, None),
    )


def by_cupy() -> tuple[LaunchHook, Launch, Launch]:
    """The same of CuPy's, which have the address of a function and call that."""
    library = Library()
    plain = LAUNCH(ctypes.cast(library.cuLaunchKernel, POINTER).value or 0)
    launches = Launches(library)
    hook = launches.hook = LaunchHook(launches, enabled=True)
    launches.intercept(library)
    hooked = LAUNCH(ctypes.cast(library.cuLaunchKernel, POINTER).value or 0)
    launch = KERNEL, 1, 1, 1, *BLOCK, 0, None, None, None
    return hook, lambda: plain(*launch), lambda: hooked(*launch)


def took_us(launch: Launch) -> float:
    """Microseconds of a launch, in a row of very many."""
    began = time.perf_counter()
    for _ in range(N_LAUNCHES):
        launch()
    return (time.perf_counter() - began) / N_LAUNCHES * 1e6


def measure(way: Callable[[], tuple[LaunchHook, Launch, Launch]], repeats: int) -> dict[str, float]:
    """Microseconds without the hook, and what each mode adds; medians of series in turns."""
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
                # That is what was timed: launches in that mode, and no other.
                is_shaped = hook.dynamic_nbytes(KERNEL, BLOCK, 0) > 0
                assert is_shaped == bool(pending), (mode, hook.decisions())
    # The first of each made the decision.
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
