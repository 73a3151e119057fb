"""Kernels of the GPU benchmark and of the GPU tests: C++ sources, and CuPy's kernels of them.

The sources are CUDA, or HIP where AMD's compiler defines its name. A test that needs no GPU
compiles them for sm_90.
"""

from __future__ import annotations

import functools
from typing import Any

#: Parts of the kernels that depend on the device: a clock that all blocks share, in nanoseconds; an
#: addition that the compiler keeps; and a pause of a thread. AMD's clock ticks every 10 ns.
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

#: Adds 1 to each byte, once a round. The compiler cannot merge the rounds, so each costs time.
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

#: Waits until the host opens the gate. It also ends after a time limit, because a failing test
#: must end too.
GATE = r"""
extern "C" __global__ void gate(const volatile int* is_open, long long most_ns) {
    const long long began = now_ns();
    do {
        if (*is_open) return;
        rest();
    } while (now_ns() - began < most_ns);
}
"""

#: Multiplies and adds in registers. Its speed depends only on the number of resident blocks. It
#: also records when its first launch began.
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

#: Copies as a communication library does: with few large blocks, through shared memory. It also
#: records when its first launch began.
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

#: Writes the size of the dynamic shared memory that a launch requested. Only NVIDIA's devices have
#: a register for it.
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
    """Return a `cupy.RawKernel`, which is compiled at its first launch."""
    import cupy

    return cupy.RawKernel(SOURCES[name], name)


def add_rounds(array: Any, rounds: int) -> None:
    """Launch `ADD_ROUNDS` on the current stream."""
    import numpy as np

    blocks = min(132 * 8, -(-array.nbytes // 256))
    arguments = (array, np.int64(array.nbytes), np.int32(rounds))
    kernel("add_rounds")((blocks,), (256,), arguments)
