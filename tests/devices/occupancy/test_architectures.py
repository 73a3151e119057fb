"""The table of GPU architectures is complete, has sources, and is found by a GPU's name."""

from __future__ import annotations

import dataclasses

import pytest

from dask_gpurt.devices.occupancy.architectures import (
    ARCHITECTURES,
    GPUS,
    KIB,
    architecture_of,
    gpu_named,
)

WANTED = {"A40", "A100", "H100", "H200", "B200", "L40S", "V100", "MI250X"}


def test_planned_gpus_are_in_the_table():
    assert set(GPUS) >= WANTED
    assert {gpu.architecture.name for gpu in GPUS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda one: one.name)
def test_every_figure_has_a_source(architecture):
    figures = {one.name for one in dataclasses.fields(architecture)}
    figures -= {"name", "capability", "sources"}
    assert set(architecture.sources) == figures
    assert all(source.strip() for source in architecture.sources.values())


def test_every_number_of_multiprocessors_has_a_source():
    assert all(gpu.source.strip() and gpu.n_sms > 0 for gpu in GPUS.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda one: one.name)
def test_figures_agree_with_one_another(architecture):
    one = architecture
    assert one.warps_per_sm * one.warp_size == one.threads_per_sm
    assert one.warps_per_sm % one.partitions == 0
    assert one.registers_per_sm % (one.partitions * one.register_granule) == 0
    assert one.registers_per_block <= one.registers_per_sm
    # A block of one warp with the most registers fits.
    assert one.registers_per_thread * one.warp_size <= one.registers_per_sm // one.partitions
    assert one.shared_per_sm_nbytes % one.shared_granule_nbytes == 0
    assert one.shared_per_block_nbytes <= one.shared_per_block_opt_in_nbytes
    # The largest block fits with the driver's reserve, and a second one does not.
    largest = one.shared_per_block_opt_in_nbytes + one.shared_reserved_nbytes
    assert largest == one.shared_per_sm_nbytes


#: Threads, blocks, shared memory of a multiprocessor and of a block, in KiB. Copied again from the
#: makers' tables, to reveal slips in the product's table.
LIMITS = {
    "V100": ((7, 0), 2048, 32, 96, 96, 256),
    "T4": ((7, 5), 1024, 16, 64, 64, 256),
    "A100": ((8, 0), 2048, 32, 164, 163, 128),
    "A40": ((8, 6), 1536, 16, 100, 99, 128),
    "L40S": ((8, 9), 1536, 24, 100, 99, 128),
    "H100": ((9, 0), 2048, 32, 228, 227, 128),
    "H200": ((9, 0), 2048, 32, 228, 227, 128),
    "B200": ((10, 0), 2048, 32, 228, 227, 128),
    "MI250X": (None, 2048, 32, 64, 64, 512),
}


def test_limits_of_architectures_are_as_published():
    found = {
        gpu.name: (
            gpu.architecture.capability,
            gpu.architecture.threads_per_sm,
            gpu.architecture.blocks_per_sm,
            gpu.architecture.shared_per_sm_nbytes // KIB,
            gpu.architecture.shared_per_block_opt_in_nbytes // KIB,
            gpu.architecture.shared_granule_nbytes,
        )
        for gpu in GPUS.values()
    }
    assert found == LIMITS


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "A100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI250X", "MI250X"),
        ("h200", "H200"),
    ],
)
def test_devices_are_found_by_name(device_name, name):
    assert gpu_named(device_name).name == name


@pytest.mark.parametrize(
    "device_name", ["", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA A10G", "A1000", "Tesla P100"]
)
def test_similar_device_names_do_not_match(device_name):
    assert gpu_named(device_name) is None


def test_architectures_are_found_by_capability():
    for one in ARCHITECTURES.values():
        if one.capability is not None:
            assert architecture_of(one.capability) is one


@pytest.mark.parametrize("capability", [(8, 7), (9, 1), (12, 0), (6, 0)])
def test_near_capability_is_not_matched(capability):
    assert architecture_of(capability) is None
