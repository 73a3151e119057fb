"""Has every launch of CuPy's pass a `LaunchHook`: of raw, elementwise and reduction kernels.

CuPy launches by `cuLaunchKernel`, and looks up its address when it first calls the driver. The
library that it looks in is given another function under that name just then; afterwards the
address is fixed for the life of the process, and no other way leads in. So `cupy_launches` is
called when a worker starts, before CuPy has done anything, and only where launches are to be
shaped: each of them then goes through Python once more.

Not to be shaped, and not: cooperative launches, which never end if fewer blocks are resident than
they count on (another function of the driver), launches that a graph captures (it would keep what
was pending then), and kernels inside libraries (cuBLAS, CUB, libcudf), which have addresses of
their own.

Nothing may be raised into the driver's caller: it would take the launch for made. An interrupt of
the main thread in the midst of a launch is; tasks run in other threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Hashable
from typing import Any

from dask_gpurt.devices.occupancy.shaping import (
    Extent,
    KernelAttributes,
    LaunchHook,
    LaunchRefusedError,
)

LIBRARY = "libcuda.so.1"

# CUresult and CUfunction_attribute, of the driver's interface, which is stable.
_INVALID_VALUE, _OUT_OF_RESOURCES = 1, 701
_MAX_THREADS, _STATIC, _REGISTERS, _MAX_DYNAMIC, _CARVEOUT = 0, 1, 4, 8, 9
#: Of the carveout: all that can be shared memory. A multiprocessor that has to change the division
#: drains first.
_ALL_SHARED = 100

_POINTER, _UINT, _INT = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int
_LAUNCH = ctypes.CFUNCTYPE(_INT, _POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER)
_UNLOAD = ctypes.CFUNCTYPE(_INT, _POINTER)
_GET_ATTRIBUTE = ctypes.CFUNCTYPE(_INT, ctypes.POINTER(_INT), _INT, _POINTER)
_SET_ATTRIBUTE = ctypes.CFUNCTYPE(_INT, _POINTER, _INT, _INT)
_IS_CAPTURING = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER)


class LaunchStatusError(RuntimeError):
    """The driver answered with a status that is no refusal: an earlier kernel failed, say."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status} of the CUDA driver")
        self.status = status


class _RefusedError(LaunchRefusedError):
    def __init__(self, status: int, nbytes: int) -> None:
        super().__init__(f"status {status} of the CUDA driver for {nbytes} bytes")
        self.status = status


class Launches:
    """Launches of one process; the `LaunchDriver` of its hook.

    Parameters
    ----------
    library
        The driver's, as ctypes loads it.

    Attributes
    ----------
    hook
        What launches pass, if anything.
    """

    def __init__(self, library: Any) -> None:
        self.hook: LaunchHook | None = None
        #: A module was unloaded, so handles of its kernels may come back as those of others.
        self._is_stale = False
        #: Where the driver answers each thread.
        self._answers = threading.local()

        def bound(prototype: Any, name: str) -> Any:
            return prototype(ctypes.cast(getattr(library, name), _POINTER).value)

        self._launch = bound(_LAUNCH, "cuLaunchKernel")
        self._unload = bound(_UNLOAD, "cuModuleUnload")
        self._get_attribute = bound(_GET_ATTRIBUTE, "cuFuncGetAttribute")
        self._set_attribute = bound(_SET_ATTRIBUTE, "cuFuncSetAttribute")
        self._is_capturing = bound(_IS_CAPTURING, "cuStreamIsCapturing")
        self._in_front = {
            "cuLaunchKernel": _LAUNCH(self._launched),
            "cuModuleUnload": _UNLOAD(self._unloaded),
        }

    def intercept(self, library: Any) -> None:
        """From here on, who looks into this library finds these functions."""
        for name, function in self._in_front.items():
            setattr(library, name, function)
            # One reference for whoever has the address: modules are unloaded up to the very end of
            # the process, when nothing of ours is left.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))

    # ------------------------------------------------------------------ called by the library

    def _launched(
        self,
        kernel: int,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        asked_nbytes: int,
        stream: int | None,
        arguments: int | None,
        extra: int | None,
    ) -> int:
        # One by one: this is the way of every launch, and tuples cost.
        hook = self.hook
        nbytes = asked_nbytes
        if hook is not None:
            if self._is_stale:
                self._forget(hook)
            nbytes = hook.dynamic_nbytes(kernel, (bx, by, bz), asked_nbytes)
        if hook is None or nbytes == asked_nbytes or self._captures(stream):
            status: int = self._launch(
                kernel, gx, gy, gz, bx, by, bz, asked_nbytes, stream, arguments, extra
            )
            return status
        try:
            rest = (stream, arguments, extra)
            hook.launch_with(nbytes, kernel, (gx, gy, gz), (bx, by, bz), asked_nbytes, rest)
        except (LaunchStatusError, _RefusedError) as error:
            return error.status
        return 0

    def _unloaded(self, module: int) -> int:
        # Noted only: modules die wherever the garbage collector runs, which may be in the midst of
        # a decision, with the hook's lock held. No handle is used again before this returns.
        self._is_stale = True
        status: int = self._unload(module)
        return status

    def _forget(self, hook: LaunchHook) -> None:
        """Of all kernels: which module they are of is not known, and deciding again is cheap."""
        self._is_stale = False
        for decided in hook.decisions():
            hook.forget(decided.kernel)

    def _captures(self, stream: int | None) -> bool:
        try:
            state, address = self._answers.place
        except AttributeError:
            state = _INT()
            address = ctypes.addressof(state)
            self._answers.place = state, address
        # The status is not 0 where asking about the default stream disturbs a capture elsewhere.
        return bool(self._is_capturing(stream, address) or state.value)

    # ------------------------------------------------------------------ a `LaunchDriver`

    def attributes(self, kernel: Hashable) -> KernelAttributes:
        def attribute(number: int) -> int:
            value = _INT()
            status = self._get_attribute(ctypes.byref(value), number, kernel)
            if status:
                raise LaunchStatusError(status)
            return value.value

        return KernelAttributes(
            registers=attribute(_REGISTERS),
            static_nbytes=attribute(_STATIC),
            max_threads=attribute(_MAX_THREADS),
            max_dynamic_nbytes=attribute(_MAX_DYNAMIC),
        )

    def launch(
        self, kernel: Hashable, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        """`stream` is the stream and the kernel's arguments, as the driver takes them.

        Raises
        ------
        LaunchRefusedError
            Likewise `set_max_dynamic_shared`.
        LaunchStatusError
            The driver's own errors.
        """
        status = self._launch(kernel, *grid, *block, shared_nbytes, *stream)
        if status in (_INVALID_VALUE, _OUT_OF_RESOURCES):
            raise _RefusedError(status, shared_nbytes)
        if status:
            raise LaunchStatusError(status)

    def set_max_dynamic_shared(self, kernel: Hashable, nbytes: int) -> None:
        status = self._set_attribute(kernel, _MAX_DYNAMIC, nbytes)
        if status:
            raise _RefusedError(status, nbytes)
        # Only a preference: without it fewer blocks may be resident, never more.
        self._set_attribute(kernel, _CARVEOUT, _ALL_SHARED)


_launches: Launches | None = None


def cupy_launches() -> Launches:
    """The launches that CuPy makes in this process. Once attached they stay so.

    Raises
    ------
    ImportError
        There is no CuPy.
    RuntimeError
        CuPy has called the driver before, or there is none.
    """
    global _launches
    if _launches is None:
        _launches = _attached()
    return _launches


def _attached() -> Launches:
    # Imported before, so that it loads its other libraries as ever.
    import cupy  # noqa: F401
    from cupy_backends.cuda.api import driver

    found: list[Launches] = []
    stock: Any = ctypes.CDLL

    class Library(stock):  # type: ignore[misc]
        def __init__(self, name: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(name, *arguments, **keywords)
            if name == LIBRARY:
                launches = Launches(self)
                launches.intercept(self)
                found.append(launches)

    ctypes.CDLL = Library  # type: ignore[misc]
    try:
        # The cheapest of all calls. It needs no context, and may fail.
        with contextlib.suppress(driver.CUDADriverError):
            driver.ctxGetCurrent()
    finally:
        ctypes.CDLL = stock  # type: ignore[misc]
    if not found:
        raise RuntimeError("CuPy has called the driver before: attach when the process starts")
    return found[0]
