"""A table of GPU architectures: the resources of one multiprocessor, and their allocation units.

`devices.occupancy.resident_blocks` computes with these figures, in tests and on machines without a
GPU. With a GPU, ask its driver. Some boards have fewer multiprocessors than the table says (an H100
on PCIe has 114), and partitions of a GPU have fewer still. The limits of one multiprocessor are the
same on all boards of a compute capability, and plans depend on these limits only.

`Architecture.sources` names the source of each figure. The table uses NVIDIA's words for AMD too: a
compute unit is a multiprocessor, a wavefront a warp, LDS shared memory, a SIMD a partition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

KIB = 1 << 10


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor.

    Attributes
    ----------
    name
        The name in compilers: `sm_90`, `gfx90a`.
    capability
        Compute capability; None for AMD.
    threads_per_block, threads_per_sm, blocks_per_sm
        Most threads in a block; most threads and blocks resident at the same time.
    barriers_per_sm
        Most resident blocks with more than one warp, each of which needs a barrier. None if
        barriers do not limit the number of blocks.
    registers_per_thread, registers_per_block, registers_per_sm
        32-bit registers. `registers_per_thread` is the limit for one thread.
    register_granule
        A warp gets registers in multiples of this.
    partitions
        Number of parts of the register file. All registers of a warp lie in one part.
    shared_per_sm_nbytes
        Largest shared memory: the L1 cache keeps as little of the array as possible.
    shared_per_block_nbytes, shared_per_block_opt_in_nbytes
        Most shared memory of a block, static and dynamic; and the limit for a kernel that has
        opted in to more.
    shared_reserved_nbytes
        Shared memory that the driver takes for each block, in addition to the block's own.
    shared_granule_nbytes
        A block gets shared memory in multiples of this.
    sources
        Source of each figure, by field name.
    """

    name: str
    capability: tuple[int, int] | None
    warp_size: int
    threads_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    barriers_per_sm: int | None
    registers_per_thread: int
    registers_per_block: int
    registers_per_sm: int
    register_granule: int
    partitions: int
    shared_per_sm_nbytes: int
    shared_per_block_nbytes: int
    shared_per_block_opt_in_nbytes: int
    shared_reserved_nbytes: int
    shared_granule_nbytes: int
    sources: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def warps_per_sm(self) -> int:
        """Most warps resident at the same time."""
        return self.threads_per_sm // self.warp_size


@dataclass(frozen=True)
class GpuModel:
    """A product: an architecture, and how many multiprocessors its full board has."""

    name: str
    architecture: Architecture
    n_sms: int
    source: str


_GUIDE = "CUDA Programming Guide 13, appendix Compute Capabilities, tables of limits"
_OCCUPANCY = "cuda_occupancy.h of the CUDA toolkit, which the driver's occupancy calls agree with"
_VOLTA = "Volta Tuning Guide; cuda_occupancy.h of the CUDA toolkit"
_AMPERE = "Ampere Tuning Guide, unified shared memory"
_ADA = "Ada Tuning Guide, unified shared memory"
_HOPPER = "Hopper Tuning Guide, unified shared memory"
_BLACKWELL = "Blackwell Tuning Guide, unified shared memory"
_OPT_IN = "CUDA Programming Guide 13: static shared memory, and all without opt-in, ends at 48 KiB"
_LLVM = "LLVM, AMDGPU target, AMDGPUBaseInfo.cpp, limits of gfx90a"
_ROCM = "ROCm documentation, AMD GPU specifications"
_AMDGPU = "LLVM, User Guide for AMDGPU, kernel descriptor, granulated LDS size of GFX7 to GFX10"

_FIGURES = {one.name for one in fields(Architecture)} - {"name", "capability", "sources"}


def _sources(default: str, **others: str) -> Mapping[str, str]:
    return MappingProxyType(dict.fromkeys(_FIGURES, default) | others)


_CUDA_SOURCES = {
    "barriers_per_sm": _OCCUPANCY,
    "register_granule": _OCCUPANCY,
    "partitions": _OCCUPANCY,
    "shared_granule_nbytes": _OCCUPANCY,
    "shared_per_block_nbytes": _OPT_IN,
}

SM80 = Architecture(
    name="sm_80",
    capability=(8, 0),
    warp_size=32,
    threads_per_block=1024,
    threads_per_sm=2048,
    blocks_per_sm=32,
    barriers_per_sm=None,
    # The toolkit's header says 256, the guide 255. Compilers never use more than 255.
    registers_per_thread=255,
    registers_per_block=65536,
    registers_per_sm=65536,
    register_granule=256,
    partitions=4,
    shared_per_sm_nbytes=164 * KIB,
    shared_per_block_nbytes=48 * KIB,
    shared_per_block_opt_in_nbytes=163 * KIB,
    shared_reserved_nbytes=1 * KIB,
    shared_granule_nbytes=128,
    sources=_sources(_GUIDE, **_CUDA_SOURCES, shared_reserved_nbytes=_AMPERE),
)

SM70 = replace(
    SM80,
    name="sm_70",
    capability=(7, 0),
    shared_per_sm_nbytes=96 * KIB,
    shared_per_block_opt_in_nbytes=96 * KIB,
    shared_reserved_nbytes=0,
    shared_granule_nbytes=256,
    # The guide of CUDA 13 begins at 7.5.
    sources=_sources(_VOLTA),
)

SM75 = replace(
    SM70,
    name="sm_75",
    capability=(7, 5),
    threads_per_sm=1024,
    blocks_per_sm=16,
    shared_per_sm_nbytes=64 * KIB,
    shared_per_block_opt_in_nbytes=64 * KIB,
    sources=_sources(_GUIDE, **_CUDA_SOURCES, shared_reserved_nbytes=_OCCUPANCY),
)

SM86 = replace(
    SM80,
    name="sm_86",
    capability=(8, 6),
    threads_per_sm=1536,
    blocks_per_sm=16,
    shared_per_sm_nbytes=100 * KIB,
    shared_per_block_opt_in_nbytes=99 * KIB,
)

SM89 = replace(
    SM86,
    name="sm_89",
    capability=(8, 9),
    blocks_per_sm=24,
    sources=_sources(_GUIDE, **_CUDA_SOURCES, shared_reserved_nbytes=_ADA),
)

SM90 = replace(
    SM80,
    name="sm_90",
    capability=(9, 0),
    shared_per_sm_nbytes=228 * KIB,
    shared_per_block_opt_in_nbytes=227 * KIB,
    sources=_sources(_GUIDE, **_CUDA_SOURCES, shared_reserved_nbytes=_HOPPER),
)

SM100 = replace(
    SM90,
    name="sm_100",
    capability=(10, 0),
    sources=_sources(_GUIDE, **_CUDA_SOURCES, shared_reserved_nbytes=_BLACKWELL),
)

GFX90A = Architecture(
    name="gfx90a",
    capability=None,
    warp_size=64,
    threads_per_block=1024,
    # Eight wavefronts in each of four SIMDs.
    threads_per_sm=2048,
    blocks_per_sm=32,
    barriers_per_sm=16,
    # Vector registers, including those of matrix instructions. Scalar registers can limit the
    # number of wavefronts too, but are not modelled.
    registers_per_thread=512,
    registers_per_block=4 * 512 * 64,
    registers_per_sm=4 * 512 * 64,
    register_granule=8 * 64,
    partitions=4,
    shared_per_sm_nbytes=64 * KIB,
    shared_per_block_nbytes=64 * KIB,
    shared_per_block_opt_in_nbytes=64 * KIB,
    shared_reserved_nbytes=0,
    shared_granule_nbytes=512,
    sources=_sources(_LLVM, shared_per_sm_nbytes=_ROCM, shared_granule_nbytes=_AMDGPU),
)

ARCHITECTURES = {one.name: one for one in (SM70, SM75, SM80, SM86, SM89, SM90, SM100, GFX90A)}

#: GPUs by the word that identifies them in the driver's device name.
GPUS = {
    one.name: one
    for one in (
        GpuModel("V100", SM70, 80, "Volta architecture white paper"),
        GpuModel("T4", SM75, 40, "Turing architecture white paper"),
        GpuModel("A100", SM80, 108, "Ampere GA100 architecture white paper"),
        GpuModel("A40", SM86, 84, "A40 data sheet: 10,752 cores, 128 for each"),
        GpuModel("L40S", SM89, 142, "L40S data sheet: 18,176 cores, 128 for each"),
        GpuModel("H100", SM90, 132, "Hopper architecture white paper, SXM5 board"),
        GpuModel("H200", SM90, 132, "as a device of this name reports"),
        # No publication of NVIDIA states this figure.
        GpuModel("B200", SM100, 148, "as devices of this name are reported to report"),
        GpuModel(
            "MI250X", GFX90A, 110, "ROCm documentation, AMD GPU specifications: one of two dies"
        ),
    )
}


def architecture_of(capability: tuple[int, int]) -> Architecture | None:
    """Return the architecture with a compute capability, or None if the table lacks it.

    There is no fallback to a similar capability: 8.0 and 8.6, for example, differ in every limit.
    """
    for one in ARCHITECTURES.values():
        if one.capability == capability:
            return one
    return None


def gpu_named(device_name: str) -> GpuModel | None:
    """Return the product with a driver's device name, or None if the table lacks it.

    Examples
    --------
    >>> gpu_named("NVIDIA A100-SXM4-80GB").name
    'A100'
    >>> gpu_named("NVIDIA GH200 480GB") is None
    True
    """
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    for word in words:
        if word in GPUS:
            return GPUS[word]
    return None
