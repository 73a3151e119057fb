"""Machines are read from `/sys`, also if some files are odd."""

from __future__ import annotations

import pytest

from dask_gpurt.topology import sysfs
from dask_gpurt.topology.machine import MachineReport
from dask_gpurt.topology.nvml import NvmlGpu
from tests.topology.trees import NAMES, machine, make_interface, make_tree, write


def read(root, **addresses):
    return sysfs.read(root, name="box", boot="1", addresses=addresses, gpus=None)


@pytest.mark.parametrize("name", NAMES)
def test_gpus_are_the_same_with_nvml_and_without(name, tmp_path):
    with_nvml = machine(name, tmp_path / "one")
    without = machine(name, tmp_path / "two", with_nvml=False)
    assert with_nvml.gpus
    assert [one.place.address for one in with_nvml.gpus] == [
        one.place.address for one in without.gpus
    ]
    assert all(one.uuid and one.memory_nbytes for one in with_nvml.gpus)
    assert not any(one.uuid or one.memory_nbytes or one.bonds for one in without.gpus)


def test_devices_are_behind_their_bridges(tmp_path):
    found = machine("dgx-a100", tmp_path)
    first, second = (one.place for one in found.gpus[:2])
    # The hops are a port of the processor, and then an upper and a lower port of two switches.
    assert [hop.address for hop in first.hops][1:5:2] == ["0000:01:00.0", "0000:03:00.0"]
    assert [hop.address for hop in second.hops][1:5:2] == ["0000:01:00.0", "0000:0a:00.0"]
    assert first.hops[:3] == second.hops[:1] + first.hops[1:3]
    assert first.hops[3:] != second.hops[3:]
    assert first.numa == 3
    assert {hop.nbytes_per_s for hop in first.hops} == {16 * 1.969e9}


def test_numa_nodes_have_their_memory(tmp_path):
    found = machine("dgx-h100", tmp_path)
    assert [(one.number, one.memory_nbytes) for one in found.numa] == [(0, 2**40), (1, 2**40)]
    write(tmp_path / "devices/system/node/node8/meminfo", "Node 8 MemTotal: 100 kB")
    assert len(read(tmp_path).numa) == 2, "memory of a device, without processors"


def test_single_processor_has_no_numa_node(tmp_path):
    assert {one.place.numa for one in machine("pcie-box", tmp_path).gpus} == {None}


def test_cards_have_speed_kind_and_addresses(tmp_path):
    make_tree("dgx-h100", tmp_path)
    found = {one.name: one for one in read(tmp_path, ens6f0=["10.0.0.1", "fe80::1"]).cards}
    assert found["ibp153s0"].kind == "infiniband"
    assert found["ibp153s0"].nbytes_per_s == 50e9
    assert found["ens6f0"].kind == "ethernet"
    assert found["ens6f0"].addresses == ("10.0.0.1", "fe80::1")
    assert found["ens6f0"].place.numa == 0
    assert not {"lo", "veth0"} & found.keys(), "without hardware"
    many = read(tmp_path, ens6f0=[f"10.0.{i >> 8}.{i & 255}" for i in range(1000)])
    assert MachineReport.from_plain(MachineReport(many, None).to_plain()).machine == many


def test_card_without_a_speed_is_described(tmp_path):
    assert {one.nbytes_per_s for one in machine("p4d", tmp_path).cards} == {0.0}


def test_card_that_is_down_is_left_out(tmp_path):
    make_tree("pcie-box", tmp_path)
    write(tmp_path / "class/net/enp5s0/operstate", "down")
    assert read(tmp_path).cards == ()


def test_vlan_of_a_bond_is_placed_at_its_first_card(tmp_path):
    make_tree("pcie-box", tmp_path)
    make_interface(tmp_path, "bond0", None, "ethernet", 20000, lower=["enp5s0"])
    make_interface(tmp_path, "bond0.7", None, "ethernet", 20000, lower=["bond0"])
    found = {one.name: one for one in read(tmp_path, **{"bond0.7": ["10.7.0.1"]}).cards}
    assert found["bond0.7"].place == found["enp5s0"].place
    assert found["bond0.7"].nbytes_per_s == 2.5e9
    assert found["bond0.7"].addresses == ("10.7.0.1",)


def test_cyclic_interfaces_are_handled(tmp_path):
    make_tree("pcie-box", tmp_path)
    make_interface(tmp_path, "loop0", None, "ethernet", 1000, lower=["loop0"])
    assert "loop0" not in [one.name for one in read(tmp_path).cards]


@pytest.mark.parametrize(
    ("speed", "width", "nbytes_per_s"),
    [
        ("2.5 GT/s PCIe", "4", 1e9),
        ("8 GT/s", "16", 16 * 0.985e9),
        ("64.0 GT/s PCIe", "8", 8 * 7.563e9),
        ("Unknown", "16", 0),
        ("7 GT/s", "16", 0),
        ("8 GT/s", "255", 0),
        ("8 GT/s", "many", 0),
    ],
)
def test_pcie_generations_have_their_rates(tmp_path, speed, width, nbytes_per_s):
    make_tree("pcie-box", tmp_path)
    device = (tmp_path / "bus/pci/devices/0000:01:00.0").resolve()
    write(device / "max_link_speed", speed)
    write(device / "max_link_width", width)
    place = read(tmp_path).gpus[0].place
    assert place.hops[-1].nbytes_per_s == pytest.approx(nbytes_per_s)


def test_empty_system_has_no_devices(tmp_path):
    found = read(tmp_path / "absent")
    assert (found.numa, found.gpus, found.cards) == ((), (), ())


def test_unexpected_files_are_left_out(tmp_path):
    make_tree("pcie-box", tmp_path)
    device = (tmp_path / "bus/pci/devices/0000:01:00.0").resolve()
    (device / "max_link_speed").write_bytes(b"\xff" * 100_000)
    (device / "numa_node").unlink()
    (device / "numa_node").mkdir()
    (tmp_path / "bus/pci/devices/0000:99:00.0").symlink_to(tmp_path / "gone")
    place = read(tmp_path).gpus[0].place
    assert (place.hops[-1].nbytes_per_s, place.numa) == (0.0, None)


def test_gpu_known_only_to_nvml_is_placed(tmp_path):
    hidden = NvmlGpu("0000:77:00.0", "GPU-1", 2**30, ())
    found = sysfs.read(tmp_path, name="box", boot="1", addresses={}, gpus=[hidden])
    assert found.gpus[0].place.address == "0000:77:00.0"


@pytest.mark.parametrize("kind", ["0x030000", "0x038000", "0x120000"])
def test_gpus_of_amd_have_their_memory_from_their_driver(tmp_path, kind):
    make_tree("pcie-box", tmp_path)
    device = (tmp_path / "bus/pci/devices/0000:01:00.0").resolve()
    write(device / "vendor", "0x1002")
    write(device / "class", kind)
    write(device / "mem_info_vram_total", 64 << 30)
    nvidia, amd = read(tmp_path).gpus[:-1], read(tmp_path).gpus[-1]
    assert (amd.place.address, amd.memory_nbytes) == ("0000:01:00.0", 64 << 30)
    assert amd.place.hops[-1].nbytes_per_s > 0
    assert "0000:01:00.0" not in [one.place.address for one in nvidia]


def test_gpus_of_amd_and_of_nvml_are_found_together(tmp_path):
    make_tree("pcie-box", tmp_path)
    device = (tmp_path / "bus/pci/devices/0000:01:00.0").resolve()
    write(device / "vendor", "0x1002")
    known = NvmlGpu("0000:77:00.0", "GPU-1", 2**30, ())
    found = sysfs.read(tmp_path, name="box", boot="1", addresses={}, gpus=[known])
    assert [one.place.address for one in found.gpus] == ["0000:77:00.0", "0000:01:00.0"]
    assert found.gpus[1].memory_nbytes == 0
