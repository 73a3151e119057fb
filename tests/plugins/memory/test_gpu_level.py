"""A store gets a GPU level if a usable GPU exists, and recognises GPU values and their sizes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from dask.sizeof import sizeof
from distributed.protocol import cuda

from dask_gpurt.devices.array import DeviceArray
from dask_gpurt.devices.emulated.emulated_device import EmulatedDevice
from dask_gpurt.devices.vendors import AMD, NVIDIA
from dask_gpurt.errors import ValueRefusedError
from dask_gpurt.plugins.memory.gpu_level import (
    GpuFacts,
    local_facts,
    register_sizeof,
    take_apart,
    why_no_gpu,
)
from dask_gpurt.plugins.patches.values.value_bytes import is_on_device
from tests.memory.emulated_gpu import Gpu

CUDA_HIDES = "CUDA_VISIBLE_DEVICES shows no GPU to this process"


@pytest.mark.parametrize(
    "facts, why",
    [
        (GpuFacts(True, (NVIDIA,)), None),
        (GpuFacts(True, (NVIDIA,), {"CUDA_VISIBLE_DEVICES": "0"}), None),
        (GpuFacts(True, (NVIDIA,), {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}), None),
        (GpuFacts(True, (NVIDIA,), {"HIP_VISIBLE_DEVICES": "-1"}), None),
        (GpuFacts(True, (AMD,), {"HIP_VISIBLE_DEVICES": "0,1"}), None),
        (GpuFacts(True, (AMD,), {"HIP_VISIBLE_DEVICES": ""}), None),
        (GpuFacts(True, (NVIDIA, AMD), {"CUDA_VISIBLE_DEVICES": ""}), None),
        (GpuFacts(False, (NVIDIA,)), "CuPy is not installed"),
        (GpuFacts(True, ()), "there is no driver of NVIDIA or AMD"),
        (GpuFacts(True, (NVIDIA,), {"CUDA_VISIBLE_DEVICES": ""}), CUDA_HIDES),
        (GpuFacts(True, (NVIDIA,), {"CUDA_VISIBLE_DEVICES": " -1 "}), CUDA_HIDES),
        (GpuFacts(True, (NVIDIA,), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}), CUDA_HIDES),
        (GpuFacts(True, (AMD,), {"CUDA_VISIBLE_DEVICES": "-1"}), CUDA_HIDES),
        (
            GpuFacts(True, (AMD,), {"HIP_VISIBLE_DEVICES": "-1"}),
            "HIP_VISIBLE_DEVICES shows no GPU to this process",
        ),
        (
            GpuFacts(True, (AMD,), {"ROCR_VISIBLE_DEVICES": "-1"}),
            "ROCR_VISIBLE_DEVICES shows no GPU to this process",
        ),
    ],
)
def test_worker_manages_values_on_a_gpu(facts, why):
    assert why_no_gpu(facts) == why


def test_device_facts_follow_the_process(monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert local_facts().environment["HIP_VISIBLE_DEVICES"] == "3"
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not local_facts().has_cupy


def test_type_checks_import_no_gpu_library():
    """A check of host values imports none, either."""
    program = (
        "import sys\n"
        "import distributed\n"  # imports RMM if it is installed
        "before = set(sys.modules)\n"
        "from dask_gpurt.plugins.memory import gpu_level, manager\n"
        "from dask_gpurt.plugins.patches.values import value_bytes\n"
        "gpu_level.why_no_gpu(gpu_level.local_facts())\n"
        "assert not value_bytes.is_on_device([1])\n"
        "print(sorted({'cupy', 'rmm', 'cudf', 'numba'} & set(sys.modules) - before))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ran.stdout.decode().strip() == "[]"


@pytest.mark.parametrize("value", [1, "a", np.zeros(1), pd.DataFrame(), [np.zeros(1)], {}, None])
def test_host_values_are_not_device_values(value):
    assert not is_on_device(value)


def test_registered_library_types_are_device_values():
    gpu = Gpu(100)
    assert is_on_device(gpu.full(1, 10))
    gpu.host.close()


def test_broken_library_has_no_device_values():
    """If a part of the library is broken, Dask keeps its values as before."""
    lost = type("Lost", (), {"__module__": "gpurt_lost_library.core"})

    @cuda.cuda_serialize.register_lazy("gpurt_lost_library")
    def register():
        raise ImportError("libcuda.so.1")

    assert not is_on_device(lost())


@pytest.mark.parametrize("number, is_refused", [(0, False), (1, True)])
def test_cupy_arrays_of_another_gpu_are_refused(monkeypatch, number, is_refused):
    taken = []
    frames = SimpleNamespace(take_apart=lambda value: (taken.append(value), "memory"))
    monkeypatch.setitem(sys.modules, "dask_gpurt.frames.device.cupy_", frames)
    monkeypatch.setattr("dask_gpurt.frames.device.cupy_", frames, raising=False)
    array = type("ndarray", (), {"__module__": "cupy", "device": SimpleNamespace(id=number)})()
    with pytest.raises(ValueRefusedError) if is_refused else nullcontext():
        take_apart(array)
    assert taken == ([] if is_refused else [array])


def test_dask_serializers_restore_a_device_value():
    """The packing uses them as `take_apart` and `put_together`."""
    gpu = Gpu(100)
    array = gpu.full(7, 10)
    header, pieces = cuda.cuda_dumps(array)
    assert [hasattr(piece, "__cuda_array_interface__") for piece in pieces] == [True, False]
    again = cuda.cuda_loads(header, pieces)
    assert type(again) is type(array)
    assert again.memory is array.memory
    gpu.host.close()


def test_sizeof_counts_bytes_on_the_device():
    register_sizeof()
    device = EmulatedDevice(1 << 20, choose=lambda n: 0)
    array = DeviceArray.from_host(np.zeros((100, 1000)), device, device.stream("one"))
    assert sizeof(array) == 800_000
    assert sizeof([array]) >= 800_000
