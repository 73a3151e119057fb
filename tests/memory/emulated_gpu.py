"""An array library for an emulated GPU, similar to CuPy: its allocator and its Dask serializers.

Arrays are in the memory of an emulated driver. The driver detects streams that are not ordered, and
refuses allocations beyond its memory. Programs work on its default stream.
"""

from __future__ import annotations

import types

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol import dask_serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize

from tests.devices.emulated_cuda import EmulatedCuda


class NoPool:
    """The type of pools, of which there are none."""


class Gpu(EmulatedCuda):
    """An emulated driver that takes all memory from a replaceable allocator.

    Attributes
    ----------
    cupy
        Module to put into `sys.modules` as `cupy`.
    most_nbytes
        Most bytes that were allocated at a time.
    """

    def __init__(self, total_nbytes, choose=None):
        super().__init__(total_nbytes, choose)
        self.most_nbytes = 0
        self.allocator = self._from_the_device
        self.cupy = types.ModuleType("cupy")
        # No pool lies below the allocator, so there is nothing that one would keep.
        self.cupy.get_default_memory_pool = lambda: None
        self.cupy.cuda = types.SimpleNamespace(
            MemoryPool=NoPool,
            get_allocator=lambda: self.allocator,
            set_allocator=lambda allocator: setattr(self, "allocator", allocator),
            get_device_id=lambda: 0,
        )

    def _from_the_device(self, nbytes):
        memory = super().allocate(nbytes, self.current_stream())
        self.most_nbytes = max(self.most_nbytes, self.host.used_nbytes)
        return memory

    def allocate(self, nbytes, stream):
        with self.computing(stream):
            return self.allocator(nbytes)

    def full(self, number, nbytes):
        """Return an array of `nbytes` bytes with the value `number`."""
        return self.array_of(np.full(nbytes, number % 251, dtype=np.uint8))

    def array_of(self, source):
        memory = self.allocate(max(1, source.nbytes), self.default_stream)
        if source.nbytes:
            self.copy_in(self.default_stream, memory, 0, source)
            self.wait_for(self.record(self.default_stream))
        return GpuArray(self, memory, source.nbytes)


class GpuArray:
    """An array of bytes."""

    def __init__(self, gpu, memory, nbytes):
        self.gpu = gpu
        self.memory = memory
        self.nbytes = nbytes

    def to_host(self):
        out = np.empty(self.nbytes, dtype=np.uint8)
        if self.nbytes:
            self.gpu.copy_out(self.gpu.default_stream, out, self.memory, 0)
            self.gpu.wait_for(self.gpu.record(self.gpu.default_stream))
        return out

    def __reduce__(self):
        # CuPy pickles an array through a copy in host memory, too.
        return _from_host, (_known(self.gpu), self.to_host())


def _from_host(number, source):
    return _GPUS[number].array_of(source)


@sizeof.register(GpuArray)
def _sizeof(array):
    return array.nbytes


@cuda_serialize.register(GpuArray)
def _take_apart(array):
    pieces = [array.gpu.array(array.memory, 0, array.nbytes), memoryview(b"of the host")]
    return {"gpu": _known(array.gpu), "nbytes": array.nbytes}, pieces


@cuda_deserialize.register(GpuArray)
def _put_together(header, pieces):
    piece, words = pieces
    assert bytes(words) == b"of the host"
    return GpuArray(_GPUS[header["gpu"]], piece.memory, header["nbytes"])


@dask_serialize.register(GpuArray)
def _for_a_message(array):
    """Make distributed look for other ways to send the array."""
    raise NotImplementedError


#: Devices that values refer to by number: they cannot be pickled, and need not be.
_GPUS = []


def _known(gpu):
    if gpu not in _GPUS:
        _GPUS.append(gpu)
    return _GPUS.index(gpu)
