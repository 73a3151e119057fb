"""The GPU of a worker's store: whether there may be one, and what opens it.

A worker whose process can see a GPU, and has CuPy, gets a home for values there. It is opened when
the first such value comes, and not before: by then the task that made it has imported the library
and begun to use the GPU, so that a worker that never does pays for neither. What values of a GPU
are is for Dask to say: those that it would send from one GPU to another as they are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dask_gpurt.config import MemorySettings
from dask_gpurt.devices.cuda.driver import CupyDriver, Driver
from dask_gpurt.devices.cuda.out_of_memory import CallWhenFull, cudf_spills
from dask_gpurt.devices.host_memory.pool import Buffer
from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.memory.device_values import LibraryCopies, library_packing
from dask_gpurt.memory.tiers import Packing
from dask_gpurt.plugins.patches import worker_memory

logger = logging.getLogger("dask_gpurt.memory")

#: What NVIDIA's drivers put there: on a machine of its own, and in Windows' subsystem for Linux.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")

#: The one kind of value that Dask is not asked about: its way with CuPy's arrays needs Numba, which
#: CuPy does not bring.
_CUPY = "cupy.ndarray"
#: The GPU that is used, as CUDA counts those that the process sees.
_NUMBER = 0
#: `CUDA_VISIBLE_DEVICES` of a process that is to see none.
_NO_GPU = ("", "-1", "nodevfiles", "none", "void")


@dataclass(frozen=True)
class Facts:
    """What can be known of a GPU without using it.

    Attributes
    ----------
    has_cupy
        Whether CuPy is installed.
    has_driver
        Whether a driver is there.
    visible
        `CUDA_VISIBLE_DEVICES`; None if it is not set.
    """

    has_cupy: bool
    has_driver: bool
    visible: str | None


def why_none(facts: Facts) -> str | None:
    """Why no value of this process can be on a GPU; None if some may be."""
    if not facts.has_cupy:
        return "CuPy is not installed"
    if not facts.has_driver:
        return "there is no NVIDIA driver"
    if facts.visible is not None and facts.visible.strip().lower() in _NO_GPU:
        return "CUDA_VISIBLE_DEVICES shows no GPU to this process"
    return None


def local_facts() -> Facts:
    """Those of this process. Imports nothing."""
    return Facts(
        has_cupy=find_spec("cupy") is not None,
        has_driver=any(map(os.path.exists, _DRIVERS)),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


class StoreDevice:
    """The first GPU that this process sees, as a home of values.

    Parameters
    ----------
    host
        How values of the host are packed.

    Attributes
    ----------
    packing
        For the store.
    """

    def __init__(self, settings: MemorySettings, host: Packing) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._has_begun = False
        self._is_closed = False
        self._copies: LibraryCopies | None = None
        self._hooks: CallWhenFull | None = None
        #: Why it could not be opened.
        self.problem: str | None = None
        #: Bytes that values may take; None until it is open.
        self.room_nbytes: int | None = None
        self.packing = library_packing(self._opened, host, take_apart, put_together)

    def begin(self, submit: Callable[[], object]) -> None:
        """A value of this device came: the first time, have somebody call `open`."""
        if not self._has_begun:
            self._has_begun = True
            submit()

    def open(self, make_room: Callable[[int], bool]) -> None:
        """Begin to use it. May import what has to do with it: not on the event loop.

        Parameters
        ----------
        make_room
            Whom to call when an allocation of any library finds no room, from then on: as
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
            self.room_nbytes = self._settings.device_nbytes(driver.total_nbytes)

    def _opened(self) -> LibraryCopies:
        if self._copies is None:
            raise RuntimeError(self.problem or "the GPU is not opened yet")
        return self._copies

    def pin(self, nbytes: int) -> Buffer:
        """Memory for the pinned tier."""
        return self._opened().driver.pin(nbytes)

    def report(self) -> dict[str, Any]:
        """For `status` and `doctor`."""
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
        """Nobody is called any more who finds no room."""
        with self._lock:
            self._is_closed = True
            hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.uninstall()


def open_driver() -> Driver:
    """The GPU that values of this process are on.

    Raises
    ------
    RuntimeError
        There is none.
    """
    return CupyDriver(_NUMBER)


def is_on_device(value: Any) -> bool:
    """Whether a value's home is the GPU."""
    return _name_of(value) == _CUPY or worker_memory.is_on_device(value)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def take_apart(value: Any) -> tuple[Any, Sequence[Any]]:
    """Header of a value of the GPU, and the pieces of memory it consists of.

    Raises
    ------
    ValueRefusedError
        Its library moves it by itself, or it is on another GPU.
    """
    if _name_of(value) == _CUPY:
        if value.device.id != _NUMBER:
            # One with gaps would be copied from there first.
            raise ValueRefusedError("it is on another GPU")
        from dask_gpurt.frames.device import cupy_

        header, memory = cupy_.take_apart(value)
        return (_CUPY, header), [memory]
    if type(value).__module__.partition(".")[0] == "cudf" and cudf_spills():
        # Two who move the same columns would undo each other's work.
        raise ValueRefusedError("cuDF spills by itself")
    header, pieces = worker_memory.take_apart_on_device(value)
    return ("dask", header), pieces


def put_together(header: Any, pieces: Sequence[Any]) -> Any:
    """The inverse, over the memory given."""
    kind, inner = header
    if kind == _CUPY:
        from dask_gpurt.frames.device import cupy_

        (memory,) = pieces
        return cupy_.put_together(inner, memory)
    return worker_memory.put_together_on_device(inner, pieces)
