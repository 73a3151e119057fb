"""Hooks that call the store to make room when CuPy or RMM run out of device memory.

`CudaDevice.allocate` calls its own `on_full`. The hooks here serve allocations of other libraries:
CuPy's arrays, and all memory from RMM, which cuDF uses. They call the same kind of callback, such
as `TieredStore.make_room`, in the thread that allocates and with none of our locks held.

cuDF can spill by itself. Two spillers would undo each other's work, so with that option set, the
hooks leave RMM alone. The caller that installs the hooks must set consistent budgets.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from dask_gpurt.devices.cuda.driver import free_kept_memory
from dask_gpurt.devices.device import OnFull

#: The number by which CuPy and RMM know the device of this process.
_DEVICE = 0


class CallWhenFull:
    """Out-of-memory hooks in CuPy and RMM, installed until `uninstall`.

    Parameters
    ----------
    on_full
        Callback as of `Device.on_full`. The hooks call it until there is room or it returns False.

    Attributes
    ----------
    installed
        Libraries that call the callback: `cupy`, `rmm`.
    left
        The other libraries, with the reason.
    """

    def __init__(self, on_full: OnFull) -> None:
        self._on_full: OnFull | None = on_full
        self._asking = threading.local()
        self._removals: dict[str, Callable[[], None]] = {}
        self.left: dict[str, str] = {}
        self._install("rmm", self._into_rmm)
        self._install("cupy", self._into_cupy)

    @property
    def installed(self) -> list[str]:
        return list(self._removals)

    def uninstall(self) -> None:
        """Restore the previous allocators, unless another program has replaced ours since.

        The callback is never called again, even if a hook stays installed below another.
        """
        self._on_full = None
        while self._removals:
            self._removals.popitem()[1]()

    def _install(self, name: str, install: Callable[[], Callable[[], None] | str]) -> None:
        try:
            found = install()
        except ImportError as error:
            found = f"cannot be imported: {error}"
        if isinstance(found, str):
            self.left[name] = found
        else:
            self._removals[name] = found

    def _ask(self, nbytes: int) -> bool:
        # Making room may allocate. A nested call would wait for itself.
        on_full = self._on_full
        if on_full is None or getattr(self._asking, "is_under_way", False):
            return False
        self._asking.is_under_way = True
        try:
            # Memory that nobody uses comes before values.
            return free_kept_memory() or on_full(nbytes)
        finally:
            self._asking.is_under_way = False

    def _into_cupy(self) -> Callable[[], None] | str:
        import cupy

        before: Callable[[int], Any] = cupy.cuda.get_allocator()
        if "rmm" in self._removals and getattr(before, "__name__", "") == "rmm_cupy_allocator":
            return "allocates from RMM"

        @functools.wraps(before)
        def allocate(nbytes: int) -> Any:
            while True:
                try:
                    return before(nbytes)
                except MemoryError:
                    if cupy.cuda.get_device_id() != _DEVICE or not self._ask(nbytes):
                        raise

        def take_back() -> None:
            if cupy.cuda.get_allocator() is allocate:
                cupy.cuda.set_allocator(before)

        cupy.cuda.set_allocator(allocate)
        return take_back

    def _into_rmm(self) -> Callable[[], None] | str:
        if cudf_spills():
            return "cuDF spills by itself"
        import rmm.mr

        before = rmm.mr.get_per_device_resource(_DEVICE)
        adaptor = rmm.mr.FailureCallbackResourceAdaptor(before, self._ask)

        def take_back() -> None:
            if rmm.mr.get_per_device_resource(_DEVICE) is adaptor:
                rmm.mr.set_per_device_resource(_DEVICE, before)

        rmm.mr.set_per_device_resource(_DEVICE, adaptor)
        return take_back


def cudf_spills() -> bool:
    """Return whether cuDF has spilling enabled. Without cuDF in the process, there is none."""
    cudf = sys.modules.get("cudf")
    return cudf is not None and bool(cudf.get_option("spill"))
