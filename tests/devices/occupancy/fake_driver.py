"""A fake driver that records launches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dask_gpurt.devices.occupancy.architectures import SM90
from dask_gpurt.devices.occupancy.shaping import (
    KernelAttributes,
    LaunchRefusedError,
    Planner,
)

KIB = 1 << 10
GRID, BLOCK = (1000, 1, 1), (16, 8, 2)  # 256 threads
TWO, FOUR = 76928, 45696  # bytes that leave 2 and 4 blocks on an sm_90


@dataclass(frozen=True)
class Made:
    """A launch that reached the driver."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_nbytes: int
    stream: object


class FakeDriver:
    """A driver with CUDA's rules about shared memory that counts calls."""

    def __init__(self, registers=32, static_nbytes=0, opt_in_nbytes=227 * KIB):
        self.registers = registers
        self.static_nbytes = static_nbytes
        self.opt_in_nbytes = opt_in_nbytes
        self.launches: list[Made] = []
        self.refused: list[Made] = []
        self.asked: Counter[str] = Counter()
        self.allowed: dict[str, int] = {}
        self.allowances: list[tuple[str, int]] = []

    def attributes(self, kernel):
        self.asked[kernel] += 1
        return KernelAttributes(
            self.registers, self.static_nbytes, 1024, self._allowed_nbytes(kernel)
        )

    def launch(self, kernel, grid, block, shared_nbytes, stream):
        made = Made(kernel, grid, block, shared_nbytes, stream)
        if shared_nbytes > self._allowed_nbytes(kernel):
            self.refused.append(made)
            raise LaunchRefusedError(f"{shared_nbytes} bytes")
        self.launches.append(made)

    def set_max_dynamic_shared(self, kernel, nbytes):
        if self.static_nbytes + nbytes > self.opt_in_nbytes:
            raise LaunchRefusedError(f"{nbytes} bytes")
        self.allowances.append((kernel, nbytes))
        self.allowed[kernel] = nbytes

    def _allowed_nbytes(self, kernel):
        return self.allowed.get(kernel, 48 * KIB - self.static_nbytes)

    @property
    def carried(self):
        return [made.shared_nbytes for made in self.launches]


class CountingPlanner:
    """A planner that records calls."""

    def __init__(self, leave, architecture=SM90):
        self.planner = Planner(architecture, leave)
        self.asked = []

    def __call__(self, launch):
        self.asked.append(launch)
        return self.planner(launch)


def always():
    return True


def launch(hook, kernel="k", shared_nbytes=0, block=BLOCK, stream=7):
    hook.launch(kernel, GRID, block, shared_nbytes, stream)
