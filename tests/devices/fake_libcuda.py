"""A fake driver library for launches, with C calling conventions and CUDA's rules.

It knows kernels by handle. Like the driver, it refuses unknown handles, more dynamic shared memory
than the kernel is allowed, and more than a block can have.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

INT, UINT, POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
INVALID_VALUE, INVALID_HANDLE, OUT_OF_RESOURCES, ILLEGAL_ADDRESS = 1, 400, 701, 700
#: Status: another thread captures, and asking about the default stream would end that capture.
CAPTURE_IMPLICIT = 906
MAX_THREADS, STATIC, REGISTERS, MAX_DYNAMIC, CARVEOUT = 0, 1, 4, 8, 9


@dataclass
class Kernel:
    """The driver's data about a kernel."""

    module: int = 1
    attributes: dict[int, int] = field(
        default_factory=lambda: {
            MAX_THREADS: 1024,
            STATIC: 0,
            REGISTERS: 32,
            MAX_DYNAMIC: 48 << 10,
            CARVEOUT: -1,
        }
    )


class FakeLibcuda:
    """The fake library, loaded instead of the real one or used directly.

    Attributes
    ----------
    launches
        Kernel, grid, block, dynamic shared memory, stream and argument addresses of each launch.
    """

    def __init__(self, name="libcuda.so.1"):
        assert name == "libcuda.so.1"
        self.kernels = {10: Kernel(), 11: Kernel(), 20: Kernel(module=2)}
        self.launches = []
        self.refused = []
        self.capturing = set()
        self.implicit = set()
        self.fails_with = 0
        launch = ctypes.CFUNCTYPE(INT, POINTER, *[UINT] * 7, POINTER, POINTER, POINTER)
        get = ctypes.CFUNCTYPE(INT, ctypes.POINTER(INT), INT, POINTER)
        capturing = ctypes.CFUNCTYPE(INT, POINTER, ctypes.POINTER(INT))
        self.cuLaunchKernel = launch(self._launch)
        self.cuModuleUnload = ctypes.CFUNCTYPE(INT, POINTER)(self._unload)
        self.cuFuncGetAttribute = get(self._get_attribute)
        self.cuFuncSetAttribute = ctypes.CFUNCTYPE(INT, POINTER, INT, INT)(self._set_attribute)
        self.cuStreamIsCapturing = capturing(self._is_capturing)
        name = ctypes.CFUNCTYPE(INT, INT, ctypes.POINTER(ctypes.c_char_p))(self._name)
        self.cuGetErrorName = self.cuGetErrorString = name
        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(INT, ctypes.POINTER(POINTER))(lambda context: 0)

    def _launch(self, kernel, gx, gy, gz, bx, by, bz, shared_nbytes, stream, params, extra):
        known = self.kernels.get(kernel)
        if known is None:
            return INVALID_HANDLE
        if self.fails_with:
            return self.fails_with
        made = (kernel, (gx, gy, gz), (bx, by, bz), shared_nbytes, stream, params, extra)
        if bx * by * bz > known.attributes[MAX_THREADS]:
            return INVALID_VALUE
        if shared_nbytes > known.attributes[MAX_DYNAMIC]:
            self.refused.append(made)
            return INVALID_VALUE
        self.launches.append(made)
        return 0

    def _unload(self, module):
        unloaded = [handle for handle, one in self.kernels.items() if one.module == module]
        for handle in unloaded:
            del self.kernels[handle]
        return 0 if unloaded else INVALID_HANDLE

    def _get_attribute(self, value, attribute, kernel):
        if kernel not in self.kernels:
            return INVALID_HANDLE
        value[0] = self.kernels[kernel].attributes[attribute]
        return 0

    def _set_attribute(self, kernel, attribute, value):
        if kernel not in self.kernels:
            return INVALID_HANDLE
        if attribute == MAX_DYNAMIC and value > 227 << 10:
            return INVALID_VALUE
        self.kernels[kernel].attributes[attribute] = value
        return 0

    def _name(self, status, name):
        name[0] = b"a status of the fake driver"
        return 0

    def _is_capturing(self, stream, state):
        if stream in self.implicit:
            return CAPTURE_IMPLICIT
        state[0] = int(stream in self.capturing)
        return 0

    @property
    def carried(self):
        return [made[3] for made in self.launches]
