"""Kernels of the GPU benchmark and tests, as C++ source and as what CuPy makes of it.

The sources are CUDA, and HIP where AMD's compiler defines its name. They are compiled for sm_90 by
a test that needs no GPU.
"""

from __future__ import annotations

import functools
from typing import Any

#: What the kernels need of a device: a clock that all its blocks share, in nanoseconds; an addition
#: that the compiler keeps; and a pause of a thread. AMD's clock ticks every 10 ns.
_DEVICE = r"""
#if defined(__HIP_PLATFORM_AMD__)
__device__ __forceinline__ long long now_ns() { return wall_clock64() * 10; }
__device__ __forceinline__ void increment(volatile unsigned int& value) { value = value + 1; }
__device__ __forceinline__ void rest() { __builtin_amdgcn_s_sleep(64); }
#else
__device__ __forceinline__ long long now_ns() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void increment(unsigned int& value) {
    asm volatile("add.u32 %0, %0, 1;" : "+r"(value));
}
__device__ __forceinline__ void rest() {}
#endif
"""

#: Adds 1 to each byte so many times over, not in one go, so that rounds cost time.
ADD_ROUNDS = r"""
extern "C" __global__ void add_rounds(unsigned char* data, long long nbytes, int rounds) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < nbytes; i += step) {
        unsigned int value = data[i];
        for (int n = 0; n < rounds; ++n) increment(value);
        data[i] = (unsigned char)value;
    }
}
"""

#: Waits until the host opens the gate, or for so many nanoseconds: a test that fails must end.
GATE = r"""
extern "C" __global__ void gate(const volatile int* is_open, long long most_ns) {
    const long long began = now_ns();
    do {
        if (*is_open) return;
        rest();
    } while (now_ns() - began < most_ns);
}
"""

#: Fused multiply-adds out of registers: as long as its blocks are resident, its speed is that of
#: their number. Says when the first of its launches began.
COMPUTE = r"""
extern "C" __global__ void __launch_bounds__(256, 4)
compute(float* out, int rounds, unsigned long long* began) {
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicMin(began, (unsigned long long)now_ns());
    float a[8];
    #pragma unroll
    for (int j = 0; j < 8; ++j) a[j] = threadIdx.x * 0.5f + j;
    for (int n = 0; n < rounds; ++n) {
        #pragma unroll
        for (int j = 0; j < 8; ++j) a[j] = fmaf(a[j], 0.999f, 0.125f);
    }
    float sum = 0;
    #pragma unroll
    for (int j = 0; j < 8; ++j) sum += a[j];
    out[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""

#: As kernels of communication: few, large blocks with shared memory, which copy. Says when the
#: first of its launches began.
COMMUNICATE = r"""
extern "C" __global__ void __launch_bounds__(512)
communicate(uint4* target, const uint4* source, long long n, unsigned long long* began) {
    extern __shared__ uint4 staging[];
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicMin(began, (unsigned long long)now_ns());
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        staging[threadIdx.x] = source[i];
        target[i] = staging[threadIdx.x];
    }
}
"""

#: Tells what a launch carried. NVIDIA's devices alone have a register for it.
SHARED_NBYTES = r"""
extern "C" __global__ void shared_nbytes(unsigned int* out) {
    unsigned int nbytes;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(nbytes));
    if (blockIdx.x == 0 && threadIdx.x == 0) *out = nbytes;
}
"""

SOURCES = {
    name: _DEVICE + source
    for name, source in {
        "add_rounds": ADD_ROUNDS,
        "gate": GATE,
        "compute": COMPUTE,
        "communicate": COMMUNICATE,
        "shared_nbytes": SHARED_NBYTES,
    }.items()
}


@functools.cache
def kernel(name: str) -> Any:
    """A `cupy.RawKernel`, compiled when it is first launched."""
    import cupy

    return cupy.RawKernel(SOURCES[name], name)


def add_rounds(array: Any, rounds: int) -> None:
    """On the current stream."""
    import numpy as np

    blocks = min(132 * 8, -(-array.nbytes // 256))
    arguments = (array, np.int64(array.nbytes), np.int32(rounds))
    kernel("add_rounds")((blocks,), (256,), arguments)
