"""Has everybody in the process who finds no room on a GPU call whoever can make some.

`CudaDevice.allocate` does so by itself (`on_full`). This is for those who allocate elsewhere:
CuPy's arrays, and what comes from RMM, which is all of cuDF's. The callback is that of the port,
so `TieredStore.make_room` of the device's home is called from here as from there: in the thread
that allocates, with no lock of ours held.

cuDF can spill by itself. Two who move the same columns would undo each other's work, so where a
user switched that on, RMM is left alone. Budgets are for whoever installs this to agree on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from dask_gpurt.devices.device import OnFull


class CallWhenFull:
    """A callback for allocations without room, until `uninstall`.

    Parameters
    ----------
    on_full
        As of `Device.on_full`. Asked again and again until there is room, or it says no.
    number
        Of the device, as CuPy and RMM count them.

    Attributes
    ----------
    installed
        Who calls it: `cupy`, `rmm`.
    left
        Who does not, and why.
    """

    def __init__(self, on_full: OnFull, number: int = 0) -> None:
        self._on_full: OnFull | None = on_full
        self._number = number
        self._asking = threading.local()
        self._removals: dict[str, Callable[[], None]] = {}
        self.left: dict[str, str] = {}
        self._install("rmm", self._into_rmm)
        self._install("cupy", self._into_cupy)

    @property
    def installed(self) -> list[str]:
        return list(self._removals)

    def uninstall(self) -> None:
        """Put back what was there; what somebody else has put on top since stays.

        Nobody is asked any more, even where the hook cannot be taken out from below another.
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
        # Who makes room may allocate for it. Asked again then, it would wait for itself.
        on_full = self._on_full
        if on_full is None or getattr(self._asking, "is_under_way", False):
            return False
        self._asking.is_under_way = True
        try:
            return on_full(nbytes)
        finally:
            self._asking.is_under_way = False

    def _into_cupy(self) -> Callable[[], None] | str:
        import cupy

        before: Callable[[int], Any] = cupy.cuda.get_allocator()
        if "rmm" in self._removals and getattr(before, "__name__", "") == "rmm_cupy_allocator":
            return "allocates from RMM"

        def allocate(nbytes: int) -> Any:
            while True:
                try:
                    return before(nbytes)
                except MemoryError:
                    if cupy.cuda.get_device_id() != self._number or not self._ask(nbytes):
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

        before = rmm.mr.get_per_device_resource(self._number)
        adaptor = rmm.mr.FailureCallbackResourceAdaptor(before, self._ask)

        def take_back() -> None:
            if rmm.mr.get_per_device_resource(self._number) is adaptor:
                rmm.mr.set_per_device_resource(self._number, before)

        rmm.mr.set_per_device_resource(self._number, adaptor)
        return take_back


def cudf_spills() -> bool:
    """Whether cuDF was told to spill. Does not import it: what is not imported moves nothing."""
    cudf = sys.modules.get("cudf")
    return cudf is not None and bool(cudf.get_option("spill"))
