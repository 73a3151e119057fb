"""An interception of CuPy's kernel launches, so that each passes a `LaunchHook`.

It covers raw, elementwise and reduction kernels. CuPy launches them with `cuLaunchKernel`, whose
address it looks up at its first call to the driver. At that moment, this module replaces the
function in the library object that CuPy searches. Later, the address is fixed for the life of the
process, and no other hook exists. So call `cupy_launches` when a worker starts, before CuPy calls
the driver. Call it only if launches will be shaped, because each launch then takes a detour through
Python.

Three kinds of launches are not shaped. Cooperative launches use another driver function; they hang
if fewer blocks are resident than they expect. Launches captured by a graph would keep the decision
of that moment. Kernels inside libraries (cuBLAS, CUB, libcudf) use addresses of their own.

No error may reach the driver's caller, which would take the launch for made. Only an interrupt of
the main thread during a launch can; tasks run in other threads.
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

# CUresult and CUfunction_attribute of the driver API, which is stable.
_INVALID_VALUE, _OUT_OF_RESOURCES = 1, 701
_MAX_THREADS, _STATIC, _REGISTERS, _MAX_DYNAMIC, _CARVEOUT = 0, 1, 4, 8, 9
#: Prefer the largest shared memory. To change the split, a multiprocessor must drain first.
_ALL_SHARED = 100

_POINTER, _UINT, _INT = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int
_LAUNCH = ctypes.CFUNCTYPE(_INT, _POINTER, *[_UINT] * 7, _POINTER, _POINTER, _POINTER)
_UNLOAD = ctypes.CFUNCTYPE(_INT, _POINTER)
_GET_ATTRIBUTE = ctypes.CFUNCTYPE(_INT, ctypes.POINTER(_INT), _INT, _POINTER)
_SET_ATTRIBUTE = ctypes.CFUNCTYPE(_INT, _POINTER, _INT, _INT)
_IS_CAPTURING = ctypes.CFUNCTYPE(_INT, _POINTER, _POINTER)


class LaunchStatusError(RuntimeError):
    """An error of the driver that is not a refusal, such as the error of an earlier kernel."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status} of the CUDA driver")
        self.status = status


class _RefusedError(LaunchRefusedError):
    def __init__(self, status: int, nbytes: int) -> None:
        super().__init__(f"status {status} of the CUDA driver for {nbytes} bytes")
        self.status = status


class Launches:
    """The kernel launches of one process, and the `LaunchDriver` of their hook.

    Parameters
    ----------
    library
        The driver library, loaded with ctypes.

    Attributes
    ----------
    hook
        The hook that launches pass, or None.
    """

    def __init__(self, library: Any) -> None:
        self.hook: LaunchHook | None = None
        #: A module was unloaded, so the handles of its kernels may be reused for other kernels.
        self._is_stale = False
        #: Per thread: the variable that receives answers of the driver.
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
        """Replace the functions of the library with ours for all later lookups."""
        for name, function in self._in_front.items():
            setattr(library, name, function)
            # Never freed: callers keep the address, and modules are unloaded until the very end of
            # the process, when our objects are gone.
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
        # No tuples for the arguments: every launch runs this code, and tuples cost time.
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
        # Only set a flag: the garbage collector may unload a module at any point, even during a
        # decision, with the hook's lock held. No handle is reused before this function returns.
        self._is_stale = True
        status: int = self._unload(module)
        return status

    def _forget(self, hook: LaunchHook) -> None:
        """Forget all decisions. Nobody knows the kernels of a module, and deciding is cheap."""
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
        # The status is not 0 if asking about the default stream disturbs a capture elsewhere.
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
        """Launch a kernel. `stream` holds the stream and the arguments, in the driver's form.

        Raises
        ------
        LaunchRefusedError
            The driver refuses the amount of shared memory.
        LaunchStatusError
            The driver reports another error.
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
        # Only a preference: without it, fewer blocks may be resident, but never more.
        self._set_attribute(kernel, _CARVEOUT, _ALL_SHARED)


_launches: Launches | None = None


def cupy_launches() -> Launches:
    """Return CuPy's launches in this process. The interception stays until the process ends.

    Raises
    ------
    ImportError
            CuPy is not installed.
    RuntimeError
            CuPy has already called the driver, or there is no driver.
    """
    global _launches
    if _launches is None:
        _launches = _attached()
    return _launches


def _attached() -> Launches:
    # Imported first, so that CuPy loads its other libraries without the replaced class.
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
        # The cheapest driver call. It needs no context, and may fail.
        with contextlib.suppress(driver.CUDADriverError):
            driver.ctxGetCurrent()
    finally:
        ctypes.CDLL = stock  # type: ignore[misc]
    if not found:
        raise RuntimeError("CuPy has already called the driver: attach when the process starts")
    return found[0]
