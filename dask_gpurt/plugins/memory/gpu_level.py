"""The GPU level of a worker's store: whether there is one, its opening, and the values it holds.

A worker whose process sees a GPU and has CuPy gets a top level for GPU values. The level is opened
when the first such value arrives. By then the task that made it has imported the library and uses
the GPU, so a worker that never does pays for neither. GPU values are those that Dask would send
directly from one GPU to another.

`register_sizeof` tells Dask the size that a device value has on its device. Dask counts, places
and steals tasks by these sizes. It concerns no types but ours, so there is no way to undo it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from dask.sizeof import sizeof

from dask_gpurt.config import MemorySettings
from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.cuda.driver import CupyDriver, Driver
from dask_gpurt.devices.cuda.out_of_memory import CallWhenFull, cudf_spills
from dask_gpurt.devices.host_memory.pool import Buffer
from dask_gpurt.devices.vendors import VENDORS, Vendor, with_driver
from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.memory.decisions.learned_room import LearnedRoom
from dask_gpurt.memory.device_values import LibraryCopies, library_packing
from dask_gpurt.memory.tiers import Packing
from dask_gpurt.plugins.memory.gpu_budget import shards_on_device_nbytes
from dask_gpurt.plugins.patches.values import value_bytes

logger = logging.getLogger("dask_gpurt.memory")

#: The one type that is handled without Dask: its serialization of CuPy's arrays needs Numba, which
#: CuPy does not install.
_CUPY = "cupy.ndarray"
#: Number of the GPU in use, among those that the process sees.
_NUMBER = 0


@dataclass(frozen=True)
class GpuFacts:
    """The facts about GPUs that a process can learn without using one.

    Attributes
    ----------
    has_cupy
        Whether CuPy is installed.
    vendors
        Makers of GPUs whose driver is installed.
    environment
        Environment variables of the process.
    """

    has_cupy: bool
    vendors: tuple[Vendor, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def why_no_gpu(facts: GpuFacts) -> str | None:
    """Return why no value of this process can be on a GPU; None if some may be."""
    if not facts.has_cupy:
        return "CuPy is not installed"
    if not facts.vendors:
        return f"there is no driver of {' or '.join(one.name for one in VENDORS)}"
    hidden = [one.hidden_by(facts.environment) for one in facts.vendors]
    if all(hidden):
        return f"{hidden[0]} shows no GPU to this process"
    return None


def local_facts() -> GpuFacts:
    """Return the facts of this process. Imports nothing."""
    return GpuFacts(
        has_cupy=find_spec("cupy") is not None,
        vendors=with_driver(),
        environment=dict(os.environ),
    )


#: Values get at least this share of their room, whatever shards and unmanaged memory take.
LEAST_SHARE = 0.25


class StoreDevice:
    """The first GPU that this process sees, as a top level of the store.

    Parameters
    ----------
    host
        Packing of host values.

    Attributes
    ----------
    packing
        Packing of GPU values.
    """

    def __init__(self, settings: MemorySettings, host: Packing) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_closed = False
        self._copies: LibraryCopies | None = None
        self._hooks: CallWhenFull | None = None
        #: Why the GPU could not be opened.
        self.problem: str | None = None
        #: Bytes that values may take by the settings; None until the GPU is open.
        self._limit_nbytes: int | None = None
        self._learned = LearnedRoom()
        self.packing = library_packing(self._opened, host, take_apart, put_together)

    def begin(self, submit: Callable[[], object]) -> None:
        """Note that a GPU value arrived. The first time, `submit` is called, to schedule `open`."""
        if not self._has_begun:
            self._has_begun = True
            submit()

    def open(self, make_room: Callable[[int], bool]) -> None:
        """Begin to use the GPU. This may import libraries: not on the event loop.

        Parameters
        ----------
        make_room
            Called from then on when an allocation of any library finds no room, as
            `Device.on_full`.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                driver = open_driver()
                copies = LibraryCopies(driver)
                self._hooks = CallWhenFull(make_room)
            except Exception as error:
                self.problem = str(error) or repr(error)
                logger.warning("values of the GPU are not managed: %s", self.problem)
                return
            self._copies = copies
            self._limit_nbytes = self._settings.device_nbytes(driver.total_nbytes)

    def was_full(self, taken_nbytes: int, wanted_nbytes: int, now_s: float) -> None:
        """Note that an allocation found no room, while values took some bytes."""
        # Shards leave values less room, but that is counted where the room is fitted.
        self._learned.was_full(taken_nbytes + shards_on_device_nbytes(), wanted_nbytes, now_s)

    def room_nbytes(self, now_s: float) -> int | None:
        """Return the bytes that values may take beside shards; None until the GPU is open."""
        if (limit_nbytes := self._limit_nbytes) is None:
            return None
        room_nbytes = self._learned.room_nbytes(limit_nbytes, now_s)
        return max(room_nbytes - shards_on_device_nbytes(), int(LEAST_SHARE * room_nbytes))

    def _opened(self) -> LibraryCopies:
        if self._copies is None:
            raise RuntimeError(self.problem or "the GPU is not opened yet")
        return self._copies

    def pin(self, nbytes: int) -> Buffer:
        """Allocate memory for the pinned tier."""
        return self._opened().driver.pin(nbytes)

    def report(self) -> dict[str, Any]:
        """Return the state of the GPU, for `status` and `doctor`."""
        driver = self._copies.driver if self._copies is not None else None
        return {
            "name": driver.name if driver is not None else None,
            "total_nbytes": driver.total_nbytes if driver is not None else None,
            "evicts_for": self._hooks.installed if self._hooks is not None else [],
            "not_for": self._hooks.left if self._hooks is not None else {},
            "cudf_spills": cudf_spills(),
            "problem": self.problem,
        }

    def close(self) -> None:
        """Stop calling `make_room`."""
        with self._lock:
            self._is_closed = True
            hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.uninstall()


def open_driver() -> Driver:
    """Return the driver of the GPU that values of this process are on.

    Raises
    ------
    RuntimeError
        There is no GPU.
    """
    return CupyDriver(_NUMBER)


def is_on_device(value: Any) -> bool:
    """Return whether a value's top level is the GPU."""
    return _name_of(value) == _CUPY or value_bytes.is_on_device(value)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def take_apart(value: Any) -> tuple[Any, Sequence[Any]]:
    """Split a GPU value into a header and its pieces of memory.

    Raises
    ------
    ValueRefusedError
        The library spills the value itself, or the value is on another GPU, or Dask would rebuild
        it over memory of RMM alone.
    """
    if _name_of(value) == _CUPY:
        if value.device.id != _NUMBER:
            # A strided array would be copied on that GPU first.
            raise ValueRefusedError("it is on another GPU")
        from dask_gpurt.frames.device import cupy_

        header, memory = cupy_.take_apart(value)
        return (_CUPY, header), [memory]
    library = type(value).__module__.partition(".")[0]
    if library == "rmm":
        raise ValueRefusedError("it is a buffer of RMM")
    if library == "cudf" and cudf_spills():
        # Two spillers of the same columns would undo each other's work.
        raise ValueRefusedError("cuDF spills by itself")
    header, pieces = value_bytes.take_apart_on_device(value)
    return (library, header), pieces


def put_together(header: Any, pieces: Sequence[Any]) -> Any:
    """Restore a value over the given memory: the inverse of `take_apart`."""
    kind, inner = header
    if kind == _CUPY:
        from dask_gpurt.frames.device import cupy_

        (memory,) = pieces
        return cupy_.put_together(inner, memory)
    if kind == "cudf":
        from dask_gpurt.frames.device.cudf_ import with_addresses

        pieces = with_addresses(pieces)
    return value_bytes.put_together_on_device(inner, pieces)


def register_sizeof() -> None:
    """Teach `dask.sizeof.sizeof` the sizes of device arrays."""
    sizeof.register(DeviceArray, lambda array: array.nbytes)
