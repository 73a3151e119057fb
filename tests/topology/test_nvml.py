"""NVML's answers are read on real machines, and with drivers that lack some functions."""

from __future__ import annotations

import pytest

from dask_gpurt.topology import nvml
from tests.topology.trees import RecordedError, RecordedNvml


def bonds(name, number):
    return {one.peer: one.nbytes_per_s for one in nvml.gpus(RecordedNvml(name))[number].bonds}


@pytest.mark.parametrize(
    ("name", "rate"), [("dgx-a100", 12 * 25.781e9), ("dgx-h100", 18 * 26.562e9)]
)
def test_nvlink_switches_count_as_one_peer(name, rate):
    assert bonds(name, 0) == {None: pytest.approx(rate)}


def test_links_between_two_gpus_are_summed():
    assert bonds("dgx-1-half", 0) == {
        "0000:07:00.0": 25e9,
        "0000:0a:00.0": 25e9,
        "0000:0b:00.0": 50e9,
    }, "and those to GPUs that are not in view are left out"


def test_links_in_a_virtual_machine_lead_to_hidden_switches():
    assert bonds("p4d", 0) == {None: pytest.approx(12 * 25.781e9)}


def test_without_nvlink_there_are_no_bonds():
    assert bonds("pcie-box", 0) == {}


def test_link_without_a_reported_speed_gets_a_known_one():
    class Old(RecordedNvml):
        def nvmlDeviceGetFieldValues(self, handle, fieldIds):
            raise RecordedError("Not Supported")

        def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
            raise RecordedError("Not Supported")

    first, *_ = nvml.gpus(Old("dgx-1-half"))
    known = {one.peer: one.nbytes_per_s for one in first.bonds}
    assert known["0000:0b:00.0"] == 50e9


def test_missing_field_value_is_none():
    class Silent(RecordedNvml):
        def nvmlDeviceGetFieldValues(self, handle, fieldIds):
            (field,) = super().nvmlDeviceGetFieldValues(handle, fieldIds)
            field.nvmlReturn, field.value.uiVal = 3, 12345
            return [field]

    assert nvml.gpus(Silent("dgx-a100"))[0].bonds[0].nbytes_per_s == 12 * 25e9


def test_links_that_are_off_do_not_count():
    class Half(RecordedNvml):
        def nvmlDeviceGetNvLinkState(self, device, link):
            super().nvmlDeviceGetNvLinkState(device, link)
            return link % 2

    assert nvml.gpus(Half("dgx-a100"))[0].bonds[0].nbytes_per_s == pytest.approx(6 * 25.781e9)


def test_chip_with_host_memory_is_recognised():
    class Shared(RecordedNvml):
        def nvmlDeviceGetMemoryInfo(self, handle):
            raise RecordedError("Not Supported")

    assert nvml.gpus(Shared("pcie-box"))[0].memory_nbytes == 0


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        (b"00000000:07:00.0", "0000:07:00.0"),
        ("0001:0A:00.0", "0001:0a:00.0"),
        ("00010000:0A:00.0", "10000:0a:00.0"),
        ("nonsense", "nonsense"),
    ],
)
def test_bus_ids_are_written_as_the_kernel_does(bus_id, address):
    assert nvml.pci_address(bus_id) == address
