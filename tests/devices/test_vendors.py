"""The traces of drivers, and a CuPy that is built for the GPUs of another vendor."""

from __future__ import annotations

import pytest

from dask_gpurt.devices.vendors import AMD, NVIDIA, mismatch, with_driver


@pytest.mark.parametrize(
    "files, vendors",
    [
        ({"/dev/kfd"}, (AMD,)),
        ({"/dev/dxg"}, (NVIDIA,)),
        ({"/dev/nvidiactl", "/dev/kfd"}, (NVIDIA, AMD)),
        (set(), ()),
    ],
)
def test_drivers_are_found_by_their_files(files, vendors):
    assert with_driver(files.__contains__) == vendors


@pytest.mark.parametrize(
    "vendor, environment, name",
    [
        (NVIDIA, {}, None),
        (NVIDIA, {"CUDA_VISIBLE_DEVICES": "none"}, "CUDA_VISIBLE_DEVICES"),
        (AMD, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (AMD, {"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES"),
        (AMD, {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "-1"}, "ROCR_VISIBLE_DEVICES"),
    ],
)
def test_variable_that_hides_all_gpus_is_named(vendor, environment, name):
    assert vendor.hidden_by(environment) == name


def test_cupy_for_another_vendor_is_a_mismatch():
    assert mismatch("CUDA", (AMD,)) == (
        "CuPy is built for CUDA, and this machine has an AMD GPU: install a CuPy for ROCm"
    )
    assert mismatch("ROCm", (NVIDIA, AMD)) is None
    assert mismatch("ROCm", ()) is None
