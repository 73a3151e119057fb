"""Discovery makes the right topology of reports of real machines, and of several hosts."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

from dask_gpurt.topology import description
from dask_gpurt.topology.discovery import discover
from dask_gpurt.topology.host_draft import (
    EFFICIENCY,
    NUMA_NBYTES_PER_S,
    PCIE_NBYTES_PER_S,
    WorkerReport,
)
from dask_gpurt.topology.machine import Machine, MachineReport
from dask_gpurt.topology.probing import Measured
from tests.topology.trees import NAMES, machine


def workers(found, ip):
    """Return the reports of one worker for each GPU, and of one without a GPU."""
    n = len(found.gpus)
    seen = [
        WorkerReport(f"tcp://{ip}:{i}", str(i), ip, MachineReport(found, str(i))) for i in range(n)
    ]
    return [
        *seen,
        WorkerReport(f"tcp://{ip}:{n}", f"tcp://{ip}:{n}", ip, MachineReport(found, None)),
    ]


@pytest.fixture
def seen(tmp_path):
    """Return workers on a machine, by the name of its file."""

    def make(name, ip="10.0.0.1", host="box", **given):
        found = machine(name, tmp_path / host, host=host, addresses={CARDS[name]: [ip]}, **given)
        return workers(found, ip)

    return make


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "describe-machines.md"
#: The network interface on which workers listen, by machine.
CARDS = {
    "dgx-1-half": "none",
    "dgx-a100": "enp97s0",
    "dgx-h100": "ens6f0",
    "p4d": "ens27",
    "pcie-box": "enp5s0",
}


@pytest.mark.parametrize("name", NAMES)
def test_written_description_is_read_back_equal(seen, name):
    found = discover(seen(name))
    again = description.parse(found.as_text())
    assert set(again.links) == set(found.topology.links)
    assert (again.hosts, again.switches) == (found.topology.hosts, found.topology.switches)


def test_example_of_the_documentation_is_discovered(seen):
    *with_gpu, _ = seen("dgx-1-half")
    (example, *_) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert discover(with_gpu).as_text() == example


@pytest.mark.parametrize("name", NAMES)
def test_all_parts_of_a_host_are_connected(seen, name):
    topology = discover(seen(name)).topology
    first, *others = topology.nodes
    # No path goes through a GPU, and only GPUs are on NVSwitches.
    ends = [other for other in others if not other.endswith("/nvswitch")]
    assert all(topology.path(first, other) is not None for other in ends)


def paths(topology, host="box"):
    return lambda one, other: topology.path(f"{host}/{one}", f"{host}/{other}")


@pytest.mark.parametrize(
    ("name", "kind", "nbytes_per_s", "n_links"),
    [
        ("dgx-a100", "nvlink", 272e9, 2),
        ("dgx-h100", "nvlink", 421e9, 2),
        ("dgx-1-half", "nvlink", 22e9, 1),
        ("p4d", "nvlink", 272e9, 2),
        # `PHB` in nvidia-smi: the path goes up to the processor and down again.
        ("pcie-box", "pcie", 55.4e9, 2),
    ],
)
def test_path_between_the_first_two_gpus(seen, name, kind, nbytes_per_s, n_links):
    way = paths(discover(seen(name)).topology)("gpu0", "gpu1")
    assert (way.kind, way.bandwidth_nbytes_per_s, len(way.links)) == (kind, nbytes_per_s, n_links)


def test_gpus_without_nvlink_meet_at_their_switch(seen):
    found = discover(seen("dgx-1-half", with_nvml=False))
    way = paths(found.topology)
    assert way("gpu0", "gpu1").links == ("box/pcie0 - box/gpu0", "box/pcie0 - box/gpu1")
    assert len(way("gpu0", "gpu2").links) == 4
    assert any("NVML could not be asked" in note for note in found.notes)


def test_gpus_and_cards_meet_where_nvidia_smi_shows(seen):
    """In nvidia-smi, `PXB` is a path over switches, and `SYS` one over processors."""
    topology = discover(seen("dgx-a100")).topology
    way = paths(topology)
    assert "numa" not in "".join(way("gpu1", "ibp12s0").links)
    assert "numa" not in "".join(way("gpu0", "ibp12s0").links)
    assert len(way("gpu0", "ibp12s0").links) == len(way("gpu1", "ibp12s0").links) + 2
    assert way("gpu2", "ibp12s0").kind == "numa"
    assert [one.numa for one in topology.hosts[0].devices[::2]] == [
        "numa3",
        "numa1",
        "numa7",
        "numa5",
    ]


@pytest.mark.parametrize("visible", [("0", "1"), ("GPU-0000:01", "GPU-0000:02:00.0")])
def test_workers_are_on_their_visible_gpu(seen, visible):
    first, second, _ = seen("pcie-box")
    found = [
        one._replace(report=dataclasses.replace(one.report, gpu=gpu))
        for one, gpu in zip((first, second), visible, strict=True)
    ]
    topology = discover(found).topology
    for one, gpu in zip(found, ("gpu0", "gpu1"), strict=True):
        assert topology.node_of(address=one.address, name=one.name, host=one.host) == f"box/{gpu}"


@pytest.mark.parametrize("visible", [None, "7", "GPU-no", "MIG-GPU-0000", "G"])
def test_worker_with_an_unknown_gpu_is_on_its_host(tmp_path, visible):
    report = MachineReport(machine("pcie-box", tmp_path), visible)
    one = WorkerReport("tcp://[::1]:1", "tcp://[::1]:1", "::1", report)
    topology = discover([one]).topology
    assert topology.node_of(address=one.address, name=one.name, host=one.host) == "box/numa0"


def test_names_with_pattern_characters_are_escaped(tmp_path):
    report = MachineReport(machine("pcie-box", tmp_path), "0")
    other = MachineReport(report.machine, "1")
    seen = [
        WorkerReport("tcp://[::1]:1", "tcp://[::1]:1", "::1", report),
        WorkerReport("tcp://[::1]:2", "w*[2]?", "::1", other),
    ]
    topology = discover(seen).topology
    for one, gpu in zip(seen, ("gpu0", "gpu1"), strict=True):
        assert topology.node_of(address=one.address, name=one.name, host="") == f"box/{gpu}"


# ---------------------------------------------------------------------- several hosts


def two_hosts(seen):
    return [*seen("pcie-box", host="left"), *seen("pcie-box", "10.0.0.2", "right")]


def test_hosts_are_connected_by_the_cards_that_workers_listen_on(seen):
    topology = discover(two_hosts(seen)).topology
    assert topology.switches == ("ethernet",)
    way = topology.path("left/gpu0", "right/gpu1")
    assert way.kind == "ethernet"
    assert way.bandwidth_nbytes_per_s == 1.25e9
    assert [host.addresses for host in topology.hosts] == [("10.0.0.1",), ("10.0.0.2",)]


def test_cards_without_a_listener_connect_nothing(seen):
    both = [*seen("dgx-h100", host="left"), *seen("dgx-h100", "10.0.0.2", "right")]
    way = discover(both).topology.path("left/gpu0", "right/gpu0")
    assert (way.kind, way.bandwidth_nbytes_per_s) == ("ethernet", 12.5e9)


def test_measured_rate_overrides_the_card_speed(seen):
    measured = {
        ("10.0.0.1", "10.0.0.2"): Measured(0.7123456e9, 0.001),
        ("10.0.0.2", "10.0.0.1"): Measured(0.9e9, 0.002),
    }
    # The transfers between two workers of one host did not use the network.
    measured["10.0.0.1", "10.0.0.1"] = Measured(9e9, 0.0001)
    found = discover(two_hosts(seen), measured)
    way = found.topology.path("left/gpu0", "right/gpu1")
    assert way.bandwidth_nbytes_per_s == 0.9e9
    assert way.latency_s == pytest.approx(0.001, rel=0.01)
    assert sum("as it was measured" in note for note in found.notes) == 2


def test_host_with_an_unknown_network_is_unconnected(seen):
    both = [*seen("p4d", host="left"), *seen("p4d", "10.0.0.2", "right")]
    found = discover(both)
    assert found.topology.path("left/gpu0", "right/gpu0") is None
    assert sum("link is left out" in note for note in found.notes) == 2
    measured = {("10.0.0.1", "10.0.0.2"): Measured(2e9, 0.001)}
    found = discover(both, measured)
    assert found.topology.path("left/gpu0", "right/gpu0").bandwidth_nbytes_per_s == 2e9


def test_unmeasured_networks_are_assumed_to_be_usual(seen):
    boxes = [one for i in range(1, 5) for one in seen("p4d", f"10.0.0.{i}", f"box{i}")]
    rates = {(1, 2): 1e9, (2, 3): 2e9, (3, 1): 3e9}
    measured = {
        (f"10.0.0.{one}", f"10.0.0.{other}"): Measured(rate, 0.001)
        for (one, other), rate in rates.items()
    }
    found = discover(boxes, measured)
    assert found.topology.path("box4/gpu0", "box3/gpu0").bandwidth_nbytes_per_s == 2e9
    assert sum("assumed to be like those" in note for note in found.notes) == 1


def test_address_of_no_card_can_be_measured(seen):
    both = [*seen("dgx-1-half", host="left"), *seen("dgx-1-half", "10.0.0.2", "right")]
    measured = {("10.0.0.1", "10.0.0.2"): Measured(2e9, 0.001)}
    topology = discover(both, measured).topology
    assert topology.path("left/gpu0", "right/gpu0").bandwidth_nbytes_per_s == 2e9
    assert [nic.name for nic in topology.hosts[0].nics] == ["net0"]
    assert description.parse(description.dump(topology)).hosts == topology.hosts


def test_machines_of_the_same_name_are_separate_hosts(tmp_path):
    one = Machine("node", "boot 1", (), (), ())
    other = dataclasses.replace(one, boot="boot 2")
    seen = [
        WorkerReport(f"tcp://10.0.0.{i}:1", i, f"10.0.0.{i}", MachineReport(of, None))
        for i, of in enumerate([one, other, one])
    ]
    hosts = discover(seen).topology.hosts
    assert [host.name for host in hosts] == ["node", "node-2"]
    assert hosts[0].addresses == ("10.0.0.0", "10.0.0.2")


def test_shared_addresses_and_uuids_belong_to_the_first(tmp_path):
    """Containers may share an address, and an incomplete UUID may fit several GPUs."""
    report = MachineReport(machine("pcie-box", tmp_path, host="box"), "GPU-")
    inside = MachineReport(dataclasses.replace(report.machine, name="inside"), "1")
    seen = [
        WorkerReport("tcp://10.0.0.1:1", 0, "10.0.0.1", report),
        WorkerReport("tcp://10.0.0.1:2", "0", "10.0.0.1", inside),
        WorkerReport("tcp://box:3", "3", "box", inside),
    ]
    found = discover(seen)
    assert description.parse(found.as_text()).hosts == found.topology.hosts
    assert [host.addresses for host in found.topology.hosts] == [("10.0.0.1",), ()]
    users = [device.workers for host in found.topology.hosts for device in host.devices]
    assert [one for one in users if one] == [("0",), ("3",)]
    assert [one.split(",")[0] for one in found.notes if "another host" in one] == [
        "inside: another host has the name or address 10.0.0.1 too; that host gets its workers",
        "inside: another host has the name or address box too; that host gets its workers",
    ]


def test_machine_names_become_words(tmp_path):
    odd = Machine("my *host* / [1]", "1", (), (), ())
    found = discover([WorkerReport("tcp://a:1", 1, "a", MachineReport(odd, None))])
    assert description.parse(found.as_text()).hosts == found.topology.hosts
    nameless = dataclasses.replace(odd, name="")
    assert (
        discover([WorkerReport("tcp://a:1", 1, "a", MachineReport(nameless, None))])
        .topology.hosts[0]
        .name
        == "nameless"
    )


def test_card_may_share_its_name_with_another_part(tmp_path):
    found = machine("pcie-box", tmp_path)
    (card,) = found.cards
    names = ("gpu0", "numa0", "a b", "a*b", "", "net0")
    cards = tuple(dataclasses.replace(card, name=name) for name in names)
    odd = dataclasses.replace(found, cards=cards)
    made = discover(workers(odd, "10.0.0.1"))
    assert description.parse(made.as_text()).hosts == made.topology.hosts
    assert len(set(made.topology.nodes)) == len(made.topology.nodes)


def test_a_cluster_without_workers_has_no_hosts():
    assert description.parse(discover([]).as_text()).hosts == ()


# ---------------------------------------------------------------------- no finding


def test_unknown_speeds_are_assumed_and_marked(seen):
    found = [
        one._replace(report=dataclasses.replace(one.report, machine=slow(one.report.machine)))
        for one in seen("pcie-box")
    ]
    made = discover(found)
    assert paths(made.topology)("gpu0", "gpu1").bandwidth_nbytes_per_s == PCIE_NBYTES_PER_S
    assert any("PCIe" in note for note in made.notes)
    assert not any("PCIe" in note for note in discover(seen("dgx-a100", host="other")).notes)


def slow(found):
    def hops(place):
        return dataclasses.replace(
            place, hops=tuple(dataclasses.replace(hop, nbytes_per_s=0.0) for hop in place.hops)
        )

    return dataclasses.replace(
        found, gpus=tuple(dataclasses.replace(one, place=hops(one.place)) for one in found.gpus)
    )


def test_link_has_the_speed_of_its_slower_end(seen):
    (first, *_) = seen("pcie-box")
    gpu = first.report.machine.gpus[0]
    port, device = gpu.place.hops
    slower = dataclasses.replace(
        gpu,
        place=dataclasses.replace(
            gpu.place, hops=(dataclasses.replace(port, nbytes_per_s=8e9), device)
        ),
    )
    machine_ = dataclasses.replace(first.report.machine, gpus=(slower,))
    topology = discover([first._replace(report=MachineReport(machine_, "0"))]).topology
    assert paths(topology)("numa0", "gpu0").bandwidth_nbytes_per_s == pytest.approx(
        EFFICIENCY * 8e9
    )


def test_rate_between_numa_nodes_is_assumed(seen):
    found = discover(seen("p4d"))
    assert paths(found.topology)("numa0", "numa1").bandwidth_nbytes_per_s == NUMA_NBYTES_PER_S
    assert any("NUMA" in note for note in found.notes)
