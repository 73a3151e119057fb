"""Kernels run on the stand-in for HIP: blocks, warps, atomics, and those of CuPy."""

from __future__ import annotations

import multiprocessing
import pathlib

import numpy as np
import pytest

from tests.standins.hip_build import built
from tests.standins.hip_kernels import rewritten

SUM_OF_BLOCK = r"""
extern "C" __global__ void sum_of_block(const int* data, unsigned long long* out) {
    extern __shared__ int part[];
    part[threadIdx.x] = data[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) atomicAdd(out, (unsigned long long)part[0]);
}
"""

SUM_OF_WARP = r"""
extern "C" __global__ void sum_of_warp(const int* data, int* out) {
    int value = data[threadIdx.x];
    for (int by = warpSize / 2; by; by /= 2) value += __shfl_down(value, by);
    if (threadIdx.x % warpSize == 0) out[threadIdx.x / warpSize] = value;
}
"""


@pytest.fixture
def cupy(standin):
    return pytest.importorskip("cupy")


def test_block_wide_sum_is_right(cupy):
    data = np.random.default_rng(1).integers(0, 1000, 64 * 256).astype(np.int32)
    out = cupy.zeros(1, np.uint64)
    kernel = cupy.RawKernel(SUM_OF_BLOCK, "sum_of_block")
    kernel((64,), (256,), (cupy.asarray(data), out), shared_mem=256 * 4)
    assert int(out[0]) == data.sum()


def test_atomics_of_two_streams_lose_nothing(cupy):
    data, out = cupy.ones(256 * 64, np.int32), cupy.zeros(1, np.uint64)
    kernel = cupy.RawKernel(SUM_OF_BLOCK, "sum_of_block")
    kernel.compile()
    cupy.cuda.Stream.null.synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for stream in streams * 10:
        with stream:
            kernel((64,), (256,), (data, out), shared_mem=256 * 4)
    for stream in streams:
        stream.synchronize()
    assert int(out[0]) == 20 * 256 * 64


def test_lanes_of_a_warp_exchange_values(cupy):
    data, out = np.arange(256, dtype=np.int32), cupy.zeros(4, np.int32)
    kernel = cupy.RawKernel(SUM_OF_WARP, "sum_of_warp")
    kernel((1,), (256,), (cupy.asarray(data), out))
    assert out.get().tolist() == data.reshape(4, 64).sum(axis=1).tolist()


@pytest.mark.parametrize("n", [1, 63, 1000, 70_000])
def test_reductions_and_scans_equal_numpys(cupy, n):
    host = np.random.default_rng(n).integers(-9, 9, n)
    device = cupy.asarray(host)
    assert int(device.sum()) == host.sum()
    assert int(device.max()) == host.max()
    assert int(device.argmin()) == host.argmin()
    np.testing.assert_array_equal(cupy.cumsum(device).get(), np.cumsum(host))
    np.testing.assert_array_equal(cupy.nonzero(device)[0].get(), np.nonzero(host)[0])


def test_kernels_of_a_real_gpu_are_refused(cupy):
    """A sort is machine code in CuPy's wheel. It fails, instead of doing nothing."""
    with pytest.raises(RuntimeError, match="not supported by the stand-in"):
        cupy.sort(cupy.arange(10))


def test_wrong_programs_are_not_compiled(cupy):
    with pytest.raises(cupy.cuda.compiler.CompileException, match="nonsense"):
        cupy.RawKernel('extern "C" __global__ void f() { nonsense; }', "f").compile()


def test_kernels_are_found_in_a_program():
    found = rewritten(
        'extern "C" __global__ void __launch_bounds__(256, 4)\nf(int n) {}\n'
        "__global__ void g() { extern __shared__ float2 room[]; }"
    )
    assert "*pack_f(void" in found and "*pack_g(void" in found
    assert "float2  *room = (float2  *)standin_place.shared;" in found


def test_two_processes_build_one_standin(standin, tmp_path):
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        folders = pool.map(built, [tmp_path] * 2)
    assert folders[0] == folders[1]
    assert [path.name for path in pathlib.Path(tmp_path).iterdir()] == [folders[0].name]
