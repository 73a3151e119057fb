"""Device memory of the CUDA stand-in, for a process that has it as its `libcuda.so.1`."""

from __future__ import annotations

import ctypes
import threading
import weakref

import numpy as np

OUT_OF_MEMORY = 2

cuda = ctypes.CDLL("libcuda.so.1")
cuda.standin_get.restype = ctypes.c_longlong
cuda.standin_set.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
cuda.standin_readable.restype = ctypes.c_void_p
cuda.standin_readable.argtypes = cuda.cuMemFree_v2.argtypes = [ctypes.c_size_t]
cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t]

_here = threading.local()


def check(status: int) -> None:
    """Raise the error of a call."""
    if status == OUT_OF_MEMORY:
        raise MemoryError("the stand-in's device is full")
    if status:
        raise RuntimeError(f"the stand-in returned error {status}")


def get(name: str) -> int:
    """Return a counter or a setting."""
    value = cuda.standin_get(name.encode())
    assert value != -1 or name in ("no_context_in", "fail_allocation", "silent_event"), name
    return int(value)


def put(name: str, value: int) -> None:
    """Change a counter or a setting."""
    assert cuda.standin_set(name.encode(), value) == 0, name


def use_device() -> None:
    """Make the device current in this thread, as CUDA's runtime does at a thread's first call."""
    if hasattr(_here, "is_current"):
        return
    context = ctypes.c_void_p()
    check(cuda.cuInit(0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(cuda.cuCtxSetCurrent(context))
    _here.is_current = True


def allocate(nbytes: int) -> tuple[int, np.ndarray]:
    """Return memory's address for programs, and its bytes for functions that act as kernels.

    The memory is freed with the last array over these bytes.
    """
    use_device()
    seen = ctypes.c_size_t()
    check(cuda.cuMemAlloc_v2(ctypes.byref(seen), max(1, nbytes)))
    owner = (ctypes.c_uint8 * max(1, nbytes)).from_address(cuda.standin_readable(seen.value))
    weakref.finalize(owner, _free, seen.value).atexit = False
    return seen.value, np.frombuffer(owner, np.uint8)[:nbytes]


def _free(seen: int) -> None:
    use_device()
    cuda.cuMemFree_v2(seen)
