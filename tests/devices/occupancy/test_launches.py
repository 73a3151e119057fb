"""Launches through the driver's functions, also CuPy's, request the planned shared memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from dask_gpurt.devices.occupancy import launches as cuda_launches
from dask_gpurt.devices.occupancy.architectures import SM90
from dask_gpurt.devices.occupancy.launches import Launches
from dask_gpurt.devices.occupancy.shaping import Failure, LaunchHook, Planner, shaped
from tests.devices.fake_libcuda import (
    CARVEOUT,
    ILLEGAL_ADDRESS,
    INVALID_HANDLE,
    INVALID_VALUE,
    MAX_DYNAMIC,
    REGISTERS,
    FakeLibcuda,
)

TWO, FOUR = 76928, 45696  # bytes that leave 2 and 4 blocks of 256 threads on an sm_90


class Library:
    """The library object in which CuPy looks up functions."""


@pytest.fixture
def libcuda():
    return FakeLibcuda()


@pytest.fixture
def launches(libcuda):
    launches = Launches(libcuda)
    launches.hook = LaunchHook(launches, enabled=True)
    return launches


@pytest.fixture
def library(launches):
    library = Library()
    launches.intercept(library)
    return library


def launch(library, kernel=10, shared_nbytes=0, stream=0x77, block=(256, 1, 1)):
    return library.cuLaunchKernel(kernel, 1000, 2, 3, *block, shared_nbytes, stream, 0x5000, None)


def planned(launches, leave=2):
    return shaped(Planner(SM90, leave), lambda: True, launches.hook)


def test_launch_outside_of_a_scope_is_unchanged(library, libcuda):
    assert launch(library, shared_nbytes=100) == 0
    assert launch(library, stream=None) == 0
    assert libcuda.launches == [
        (10, (1000, 2, 3), (256, 1, 1), 100, 0x77, 0x5000, None),
        (10, (1000, 2, 3), (256, 1, 1), 0, None, 0x5000, None),
    ]


def test_a_shaped_launch_changes_only_its_shared_memory(library, libcuda, launches):
    with planned(launches):
        assert launch(library) == 0
    assert libcuda.launches == [(10, (1000, 2, 3), (256, 1, 1), TWO, 0x77, 0x5000, None)]
    assert libcuda.kernels[10].attributes[MAX_DYNAMIC] == TWO
    assert libcuda.kernels[10].attributes[CARVEOUT] == 100


def test_a_plan_within_the_allowance_does_not_change_it(library, libcuda, launches):
    with planned(launches, 4):
        launch(library)
    assert libcuda.carried == [FOUR]
    assert libcuda.kernels[10].attributes[CARVEOUT] == -1


def test_without_a_hook_launches_are_passed_on(library, libcuda, launches):
    with planned(launches):
        launches.hook = None
        assert launch(library) == 0
    assert libcuda.carried == [0]


def test_a_captured_launch_is_unchanged(library, libcuda, launches):
    libcuda.capturing.add(0x77)
    libcuda.implicit.add(None)
    with planned(launches):
        launch(library)
        launch(library, stream=None)
        launch(library, stream=0x78)
    assert libcuda.carried == [0, 0, TWO]


def test_refused_launch_is_repeated_unchanged(library, libcuda, launches):
    with planned(launches):
        launch(library)
        libcuda.kernels[10].attributes[MAX_DYNAMIC] = 48 << 10
        assert launch(library) == 0
    assert libcuda.carried == [TWO, 0]
    assert [made[3] for made in libcuda.refused] == [TWO]


def test_the_caller_gets_the_drivers_status(library, libcuda, launches):
    assert launch(library, kernel=99) == INVALID_HANDLE
    with planned(launches):
        assert launch(library, kernel=99) == INVALID_HANDLE
        assert launch(library, block=(1025, 1, 1)) == INVALID_VALUE
        libcuda.fails_with = ILLEGAL_ADDRESS
        assert launch(library) == ILLEGAL_ADDRESS
    assert libcuda.launches == []
    (first, *_) = launches.hook.decisions()
    assert isinstance(first.why, Failure), "no attributes of a kernel that is none"


def test_unloaded_kernel_is_queried_again(library, libcuda, launches):
    with planned(launches):
        launch(library)
        launch(library, kernel=20)
        assert library.cuModuleUnload(2) == 0
        libcuda.kernels[20] = type(libcuda.kernels[10])(module=3)
        libcuda.kernels[20].attributes[REGISTERS] = 255
        launch(library, kernel=20)
    assert libcuda.carried == [TWO, TWO, 0]
    assert library.cuModuleUnload(2) == INVALID_HANDLE


def test_a_module_may_be_unloaded_during_a_decision(library, libcuda, launches):
    """The garbage collector may unload a module there."""

    def plan_and_unload(asked):
        library.cuModuleUnload(2)
        return Planner(SM90, 2)(asked)

    with shaped(plan_and_unload, lambda: True, launches.hook):
        launch(library)
        launch(library)
    assert libcuda.carried == [TWO, TWO]
    assert 20 not in libcuda.kernels


def test_replaced_functions_stay_until_the_process_ends(libcuda):
    """Callers may keep the addresses."""
    launches, library = Launches(libcuda), Library()
    is_there = weakref.ref(launches)
    launches.intercept(library)
    del launches, library
    gc.collect()
    assert is_there() is not None


def test_threads_shape_their_own_cupy_launches(library, libcuda, launches):
    with planned(launches), ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch, library).result() == 0
        launch(library)
    assert libcuda.carried == [0, TWO]


def test_attribute_numbers_match_the_driver():
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    attribute, status = driver.CUfunction_attribute, driver.CUresult
    assert cuda_launches._MAX_THREADS == attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert cuda_launches._STATIC == attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    assert cuda_launches._REGISTERS == attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert dynamic == cuda_launches._MAX_DYNAMIC
    carveout = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    assert carveout == cuda_launches._CARVEOUT
    assert cuda_launches._INVALID_VALUE == status.CUDA_ERROR_INVALID_VALUE
    assert cuda_launches._OUT_OF_RESOURCES == status.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    assert driver.CUshared_carveout.CU_SHAREDMEM_CARVEOUT_MAX_SHARED == cuda_launches._ALL_SHARED


# ------------------------------------------------------------------ the real CuPy


def run(source):
    """Run code in a new process, because CuPy looks its functions up once."""
    head = """
        import ctypes
        import cupy
        from tests.devices.fake_libcuda import FakeLibcuda, INVALID_HANDLE
        from dask_gpurt.devices.occupancy.architectures import SM90
        from dask_gpurt.devices.occupancy.launches import cupy_launches
        from dask_gpurt.devices.occupancy.shaping import LaunchHook, Planner, shaped

        loaded = []
        class CDLL(FakeLibcuda):
            def __init__(self, name):
                super().__init__(name)
                loaded.append(self)
        ctypes.CDLL = CDLL
    """
    program = textwrap.dedent(head) + textwrap.dedent(source)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def needs_cupy():
    pytest.importorskip("cupy", reason="CuPy is not installed")


def test_launches_of_cupy_kernels_are_shaped(needs_cupy):
    """Raw, elementwise and reduction kernels end in this function, here over a fake driver."""
    done = run(f"""
        launches = cupy_launches()
        assert cupy_launches() is launches
        assert ctypes.CDLL is CDLL
        launches.hook = hook = LaunchHook(launches, enabled=True)
        from cupy_backends.cuda.api import driver
        (libcuda,) = loaded

        def launch(kernel=10):
            driver.launchKernel(kernel, 1000, 1, 1, 256, 1, 1, 0, 0x77, 0x5000, 0)

        launch()
        with shaped(Planner(SM90, 2), lambda: True, hook):
            launch()
            try:
                launch(99)
            except driver.CUDADriverError as error:
                assert error.status == INVALID_HANDLE
            else:
                raise AssertionError("an error of the driver was lost")
        launch()
        assert libcuda.carried == [0, {TWO}, 0], libcuda.carried
        driver.moduleUnload(1)
        assert 10 not in libcuda.kernels
    """)
    assert done.returncode == 0, done.stderr


def test_cupy_cannot_be_intercepted_after_a_driver_call(needs_cupy):
    done = run("""
        from cupy_backends.cuda.api import driver
        driver.ctxGetCurrent()
        try:
            cupy_launches()
        except RuntimeError as error:
            assert "before" in str(error)
        else:
            raise AssertionError("attached to nothing")
    """)
    assert done.returncode == 0, done.stderr
