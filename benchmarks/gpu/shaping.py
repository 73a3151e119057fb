"""Section that runs computation and communication at once, with priorities, shaping, or both.

Eight compute kernels fill the device. Eight independent kernels of a few large blocks copy, as
those of a communication library do. The section measures these modes, for three ratios of the
times that the two sides take alone:

- *serial*: both sides on one stream
- *ideal*: the longer side alone, a lower bound
- *naive*: two streams
- *priority*: communication on a stream of high priority
- *shaped*: computation leaves room on each multiprocessor, as planned by `plan_beside`
- *both*: priority and shaping
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.kernels import kernel
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s
from dask_gpurt.devices.cuda.driver import CupyDriver, why_no_cuda
from dask_gpurt.devices.device import Priority
from dask_gpurt.devices.occupancy.architectures import Architecture, architecture_of
from dask_gpurt.devices.occupancy.launches import Launches, cupy_launches
from dask_gpurt.devices.occupancy.planner import LaunchPlan, Refusal, plan_beside
from dask_gpurt.devices.occupancy.resident_blocks import Launch
from dask_gpurt.devices.occupancy.shaping import Extent, KernelAttributes, LaunchHook, shaped

N_KERNELS, REPEATS = 8, 7
N_LAUNCHES = 5_000
COMPUTE_S = 0.01
COMPUTE_THREADS, WAVES = 256, 8
COMMUNICATION_THREADS, COMMUNICATION_BLOCKS, STAGING_NBYTES = 512, 16, 24 << 10
BUFFER_NBYTES = 512 << 20
#: Ratios of the time of computation to the time of communication, each alone.
RATIOS = {"compute-heavy": 2.0, "balanced": 1.0, "communication-heavy": 0.5}


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    # This has to precede any other call of the driver.
    attach()
    return why_no_cuda() or ""


@functools.cache
def attach() -> Launches | str:
    """Return CuPy's launches, or why the hook cannot intercept them."""
    try:
        return cupy_launches()
    except (ImportError, RuntimeError) as error:
        return str(error)


class RawLaunches:
    """A `LaunchDriver` of `cupy.RawKernel`s, for a CuPy whose launches cannot be intercepted.

    The caller of a kernel asks the hook for the size of its shared memory.
    """

    def attributes(self, kernel: Any) -> KernelAttributes:
        return KernelAttributes(
            kernel.num_regs,
            kernel.shared_size_bytes,
            kernel.max_threads_per_block,
            kernel.max_dynamic_shared_size_bytes,
        )

    def launch(
        self, kernel: Any, grid: Extent, block: Extent, shared_nbytes: int, stream: Any
    ) -> None:
        kernel(grid, block, stream, shared_mem=shared_nbytes)

    def set_max_dynamic_shared(self, kernel: Any, nbytes: int) -> None:
        kernel.max_dynamic_shared_size_bytes = nbytes
        kernel.preferred_shared_memory_carveout = 100


@dataclass
class Sides:
    """The compute and communication kernels, with their memory and the amount of work."""

    rounds: int
    n_units: int
    out: Any
    target: Any
    source: Any
    #: Start times of the two sides, in nanoseconds of the device's clock.
    began: Any
    n_blocks: int
    #: The hook to ask, if CuPy's launches do not ask it by themselves.
    hook: LaunchHook | None = None

    def reset(self) -> None:
        """Forget the start times."""
        self.began.fill(np.iinfo(np.int64).max)
        self.began.device.synchronize()

    def compute(self) -> None:
        """Launch the compute kernel on the current stream."""
        block = (COMPUTE_THREADS, 1, 1)
        shared_nbytes = 0
        if self.hook is not None:
            shared_nbytes = self.hook.dynamic_nbytes(kernel("compute"), block, 0)
        arguments = (self.out, np.int32(self.rounds), self.began[0:1])
        kernel("compute")((self.n_blocks,), block, arguments, shared_mem=shared_nbytes)

    def communicate(self) -> None:
        """Launch the communication kernel on the current stream."""
        kernel("communicate")(
            (COMMUNICATION_BLOCKS,),
            (COMMUNICATION_THREADS,),
            (self.target, self.source, np.int64(self.n_units), self.began[1:2]),
            shared_mem=STAGING_NBYTES,
        )


@dataclass(frozen=True)
class Beside:
    """A planner that leaves room for one block of the communication kernel."""

    architecture: Architecture
    communication: Launch

    def __call__(self, launch: Launch) -> LaunchPlan | Refusal:
        return plan_beside(self.architecture, launch, self.communication, pending=True)


def run(report: Report) -> None:
    """Run the section on the first GPU."""
    import cupy

    driver = CupyDriver()
    properties = cupy.cuda.runtime.getDeviceProperties(driver.number)
    architecture = architecture_of((properties["major"], properties["minor"]))
    if architecture is None:
        report(Row("shaping", skipped=f"{driver.name} is not in the table of architectures"))
        return
    launches = attach()
    if isinstance(launches, str):
        report(Row("CuPy's launches through the hook", skipped=launches))
        hook = LaunchHook(RawLaunches(), enabled=True)
    else:
        launches.hook = hook = LaunchHook(launches, enabled=True)
    beside = Beside(
        architecture,
        Launch(COMMUNICATION_THREADS, kernel("communicate").num_regs, 0, STAGING_NBYTES),
    )
    n_blocks = properties["multiProcessorCount"] * 8 * WAVES
    sides = Sides(
        rounds=1000,
        n_units=BUFFER_NBYTES // 16,
        out=cupy.zeros(n_blocks * COMPUTE_THREADS, cupy.float32),
        target=cupy.zeros(BUFFER_NBYTES, cupy.uint8),
        source=cupy.ones(BUFFER_NBYTES, cupy.uint8),
        began=cupy.zeros(2, cupy.int64),
        n_blocks=n_blocks,
        hook=hook if isinstance(launches, str) else None,
    )
    experiment = Experiment(driver, sides, beside, hook)
    sides.rounds = experiment.calibrate(experiment.compute_alone, "rounds", COMPUTE_S)
    for name, ratio in RATIOS.items():
        sides.n_units = BUFFER_NBYTES // 16
        sides.n_units = min(
            BUFFER_NBYTES // 16,
            experiment.calibrate(experiment.communicate_alone, "n_units", COMPUTE_S / ratio),
        )
        report(experiment.row(name, ratio))
    report(experiment.cost())
    if not isinstance(launches, str):
        report(launch_cost(launches, beside))
    for decision in hook.decisions():
        details = {"why": str(decision)}
        report(Row("plan of the compute kernel", decision.nbytes, "B", details=details))


def launch_cost(launches: Launches, beside: Beside) -> Row:
    """Measure the host's time for a launch, with a kernel that does almost nothing."""
    import cupy

    out = cupy.zeros(1, cupy.uint32)
    hook = launches.hook
    assert hook is not None  # the caller has set it

    def launcher(is_hooked: bool, scope: Callable[[], Any]) -> Callable[[], None]:
        def launch_many() -> None:
            launches.hook = hook if is_hooked else None
            with scope():
                for _ in range(N_LAUNCHES):
                    kernel("shared_nbytes")((1,), (COMPUTE_THREADS,), (out,))
            cupy.cuda.get_current_stream().synchronize()

        return launch_many

    nothing = contextlib.nullcontext
    took_s = medians_s(
        {
            "no hook": launcher(False, nothing),
            "outside": launcher(True, nothing),
            "shaped": launcher(True, lambda: shaped(beside, lambda: True, hook)),
        },
        REPEATS,
    )
    launches.hook = hook
    more_s = {name: (s - took_s["no hook"]) / N_LAUNCHES for name, s in took_s.items()}
    return Row(
        "additional cost of a shaped launch",
        more_s["shaped"] * 1e6,
        "us",
        took_s["shaped"] / took_s["no hook"],
        "seconds shaped / seconds with no hook",
        "< 3 us",
        details={"more_s": more_s, "took_s": took_s},
    )


class Experiment:
    """The experiment in all modes, on streams of a driver."""

    def __init__(self, driver: CupyDriver, sides: Sides, beside: Beside, hook: LaunchHook) -> None:
        self._sides = sides
        self._beside = beside
        self._hook = hook
        self._compute = driver.open_stream(Priority.NORMAL)
        self._even = driver.open_stream(Priority.NORMAL)
        self._urgent = driver.open_stream(Priority.HIGH)
        self._delays_s: dict[str, list[float]] = {}

    def calibrate(self, alone: Callable[[], None], field: str, wanted_s: float) -> int:
        """Return the value of a field with which a side takes the wanted time.

        The time of the side must be proportional to the field.
        """
        alone()
        took_s = []
        for _ in range(3):
            began = time.perf_counter()
            alone()
            took_s.append(time.perf_counter() - began)
        return max(1, round(getattr(self._sides, field) * wanted_s / min(took_s)))

    def compute_alone(self) -> None:
        """Run the computation and wait for it."""
        with self._compute:
            for _ in range(N_KERNELS):
                self._sides.compute()
        self._compute.synchronize()

    def communicate_alone(self) -> None:
        """Run the communication and wait for it."""
        with self._even:
            for _ in range(N_KERNELS):
                self._sides.communicate()
        self._even.synchronize()

    def _mode(self, name: str, *, urgent: bool, shape: bool, serial: bool = False) -> Any:
        compute = self._compute
        communication = compute if serial else self._urgent if urgent else self._even

        def run_both() -> None:
            self._sides.reset()
            with self._shaped() if shape else contextlib.nullcontext():
                with compute:
                    for _ in range(N_KERNELS):
                        self._sides.compute()
            with communication:
                for _ in range(N_KERNELS):
                    self._sides.communicate()
            compute.synchronize()
            communication.synchronize()
            began = self._sides.began.get()
            self._delays_s.setdefault(name, []).append(float(began[1] - began[0]) / 1e9)

        return run_both

    def _shaped(self) -> Any:
        return shaped(self._beside, lambda: True, self._hook)

    def row(self, name: str, ratio: float) -> Row:
        """Measure all modes with the present amounts of work."""
        self._delays_s.clear()
        took_s = medians_s(
            {
                "compute alone": self.compute_alone,
                "communication alone": self.communicate_alone,
                "serial": self._mode("serial", urgent=False, shape=False, serial=True),
                "naive": self._mode("naive", urgent=False, shape=False),
                "priority": self._mode("priority", urgent=True, shape=False),
                "shaped": self._mode("shaped", urgent=False, shape=True),
                "both": self._mode("both", urgent=True, shape=True),
            },
            REPEATS,
        )
        took_s["ideal"] = max(took_s["compute alone"], took_s["communication alone"])
        best = min(("priority", "shaped", "both"), key=took_s.__getitem__)
        return Row(
            f"{name} ({ratio:g}:1)",
            took_s[best],
            "s",
            took_s[best] / took_s["serial"],
            f"seconds of {best} / seconds serial",
            "0.745 where communication-heavy" if ratio < 1 else "",
            details={
                "took_s": took_s,
                "of_serial": {mode: s / took_s["serial"] for mode, s in took_s.items()},
                "start_delay_s": {
                    mode: statistics.median(delays) for mode, delays in self._delays_s.items()
                },
            },
        )

    def cost(self) -> Row:
        """Measure the cost of shaping for a computation alone, and check that results are equal."""

        def with_shape() -> None:
            with self._shaped():
                self.compute_alone()

        def none_pending() -> None:
            with shaped(self._beside, lambda: False, self._hook):
                self.compute_alone()

        self.compute_alone()
        plain = self._sides.out.copy()
        with_shape()
        is_same = bool((plain == self._sides.out).all())
        took_s = medians_s(
            {"plain": self.compute_alone, "shaped": with_shape, "none pending": none_pending},
            REPEATS,
        )
        return Row(
            "compute alone under a shape",
            took_s["shaped"],
            "s",
            took_s["shaped"] / took_s["plain"],
            "seconds shaped / seconds plain",
            "<= 1.15; none pending <= 1.02",
            details={
                "is_same": is_same,
                "took_s": took_s,
                "none_pending_ratio": took_s["none pending"] / took_s["plain"],
            },
        )
