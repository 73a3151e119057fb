"""Workers' reports complete what a file says of machines, and never contradict it."""

from __future__ import annotations

import re

import pytest

from dask_gpurt.topology import description
from dask_gpurt.topology.discovery import discover
from dask_gpurt.topology.probing import Measured
from tests.topology.test_discovery import CARDS, PAGE, workers
from tests.topology.trees import machine

#: Bytes a second of the network card of each machine, as it reports them.
CARD = 1.25e9
NAMES = ("left", "right", "third")


@pytest.fixture
def seen(tmp_path):
    """Return the workers of three machines with two GPUs each: on each GPU one, and one on none."""
    found = []
    for i, name in enumerate(NAMES):
        ip = f"10.0.0.{i + 1}"
        addresses = {CARDS["pcie-box"]: [ip]}
        box = machine("pcie-box", tmp_path / name, host=name, addresses=addresses)
        found += [one._replace(name=one.address) for one in workers(box, ip)]
    return found


def host(number, more="", name=None):
    name = NAMES[number] if name is None else name
    address = f"10.0.0.{number + 1}"
    return f"{{name: {name}, addresses: [{address}], numa: [{{name: numa0}}]{more}}}"


def believed(seen, hosts, links="", switches="", measured=None):
    text = f"hosts: [{', '.join(hosts)}]\nswitches: [{switches}]\nlinks: [{links}]\n"
    return discover(seen, measured, given=description.parse(text))


def node(found, seen, number, gpu):
    """Return where a worker is: number 2 of a machine is on no GPU."""
    one = seen[3 * number + gpu]
    return found.topology.node_of(address=one.address, name=one.name, host=one.host)


def test_host_that_the_file_lacks_is_filled_in(seen):
    found = believed(seen[:6], [host(0, name="mine")])
    assert [one.name for one in found.topology.hosts] == ["mine", "right"]
    assert [one.is_reported for one in found.topology.hosts] == [False, True]
    for one in found.topology.hosts:
        assert [device.name for device in one.devices] == ["gpu0", "gpu1"]
    assert node(found, seen, 0, 1) == "mine/gpu1", "the file does not say where on the host"
    auto = discover(seen[:6]).topology
    assert found.topology.path("mine/gpu0", "right/gpu1") == _renamed(
        auto.path("left/gpu0", "right/gpu1"), "left", "mine"
    )


def _renamed(path, before, after):
    links = tuple(one.replace(f"{before}/", f"{after}/") for one in path.links)
    return type(path)(**{**vars(path), "links": links})


SLOW = "{between: [left/numa0, right/numa0], kind: wan, bandwidth: 10 MB/s}"


def test_speed_of_one_pair_is_enough(seen):
    topology = believed(seen, [host(0), host(1)], SLOW).topology
    slow = topology.path("left/numa0", "right/numa0")
    assert (slow.kind, slow.bandwidth_nbytes_per_s, slow.is_reported) == ("wan", 1e7, False)
    for other in ("left", "right"):
        path = topology.path(f"{other}/numa0", "third/numa0")
        assert (path.kind, path.bandwidth_nbytes_per_s) == ("ethernet", CARD)
        assert path.is_reported


def test_added_parts_do_not_avoid_a_link_of_the_file(seen):
    """The GPUs of both hosts come from reports, and so do their cards, which are faster."""
    topology = believed(seen, [host(0), host(1)], SLOW).topology
    path = topology.path("left/gpu0", "right/gpu1")
    assert (path.bandwidth_nbytes_per_s, path.is_reported) == (1e7, False)
    assert topology.path("left/gpu0", "third/gpu0").bandwidth_nbytes_per_s == CARD


@pytest.mark.parametrize("switch", ["ethernet", "fabric"])
def test_uplink_of_one_host_is_enough(seen, switch):
    card = ", nics: [{name: eth0}], links: [{between: [numa0, eth0], bandwidth: 9 GB/s}]"
    uplink = f"{{between: [third/eth0, {switch}], kind: slow, bandwidth: 10 MB/s}}"
    topology = believed(seen, [host(2, card)], uplink, switch).topology
    for other in ("left", "right"):
        path = topology.path("third/numa0", f"{other}/gpu0")
        assert (path.kind, path.bandwidth_nbytes_per_s, path.is_reported) == ("slow", 1e7, False)
    assert topology.path("left/gpu0", "right/gpu0").bandwidth_nbytes_per_s == CARD


def test_gpus_of_the_file_win_over_those_of_a_report(seen):
    only = ", devices: [{name: mine, kind: gpu, memory: 7 GiB, workers: ['tcp://10.0.0.1:0']}]"
    found = believed(seen, [host(0, only)])
    (device,) = found.topology.hosts[0].devices
    assert (device.name, device.memory_nbytes, device.is_reported) == ("mine", 7 * 2**30, False)
    assert [node(found, seen, 0, gpu) for gpu in range(3)] == [
        "left/mine",
        "left/numa0",
        "left/numa0",
    ]


def test_gpus_of_a_file_are_found_by_their_workers(seen):
    """The links of a GPU are filled in whatever the file calls it."""
    named = ", ".join(
        f"{{name: {name}, kind: gpu, workers: ['tcp://10.0.0.1:{i}']}}"
        for i, name in enumerate(("gpu1", "other"))
    )
    slow = "{between: [numa0, other], kind: pcie, bandwidth: 1 GB/s}"
    topology = believed(seen, [host(0, f", devices: [{named}], links: [{slow}]")]).topology
    auto = discover(seen).topology.path("left/numa0", "left/gpu0")
    path = topology.path("left/numa0", "left/gpu1")
    assert path.bandwidth_nbytes_per_s == auto.bandwidth_nbytes_per_s
    assert topology.path("left/numa0", "left/other").bandwidth_nbytes_per_s == 1e9
    assert len([link for link in topology.links if "left/other" in link.ends]) == 1


def test_short_example_of_the_documentation_is_enough(seen):
    (_, example, *_) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    topology = discover(seen, given=description.parse(example)).topology
    assert [one.name for one in topology.hosts] == ["here", "there", "third"]
    assert topology.path("here/gpu0", "there/gpu1").bandwidth_nbytes_per_s == 50e6
    assert topology.path("here/gpu0", "third/gpu1").bandwidth_nbytes_per_s == CARD


def test_file_wins_over_reports_and_measurements(seen):
    measured = {
        (f"10.0.0.{one}", f"10.0.0.{other}"): Measured(0.5e9, 0.001)
        for one, other in ((1, 2), (2, 3), (3, 1))
    }
    topology = believed(seen, [host(0), host(1)], SLOW, measured=measured).topology
    assert topology.path("left/gpu0", "right/gpu0").bandwidth_nbytes_per_s == 1e7
    assert topology.path("left/gpu0", "third/gpu0").bandwidth_nbytes_per_s == 0.5e9


def test_complete_file_is_believed_as_it_is_written(seen):
    written = discover(seen).as_text().replace("1.25 GB/s", "3 GB/s")
    found = discover(seen, given=description.parse(written))
    assert found.topology == description.parse(written)
    assert not any(link.is_reported for link in found.topology.links)


def test_reports_do_not_match_a_host_by_its_machine_alone(seen):
    """A worker's address decides, as it does without completion."""
    text = "hosts: [{name: left, numa: [{name: numa0}]}]"
    found = discover(seen, given=description.parse(text))
    assert [one.name for one in found.topology.hosts] == ["left", "left-2", "right", "third"]
    assert node(found, seen, 0, 0) == "left-2/gpu0"
    assert any("left-2: `addresses` of left in the file lacks 10.0.0.1" in n for n in found.notes)


def test_other_addresses_of_a_machine_belong_to_its_host(seen):
    """A machine with two networks has workers on each, and the file may know one."""
    seen[1] = seen[1]._replace(address="tcp://10.1.0.1:1", host="10.1.0.1")
    topology = believed(seen, [host(0)]).topology
    assert topology.hosts[0].addresses == ("10.0.0.1", "10.1.0.1")
    assert [one.name for one in topology.hosts] == ["left", "right", "third"]


def test_memory_of_unknown_names_is_that_of_the_first_node(seen):
    odd = "{name: mine, addresses: [10.0.0.1], numa: [{name: memory}]}"
    topology = believed(seen, [odd]).topology
    assert topology.path("mine/memory", "mine/gpu1").bandwidth_nbytes_per_s == 55.4e9
    assert [device.numa for device in topology.hosts[0].devices] == ["memory"] * 2


@pytest.mark.parametrize("hosts", [[], [host(0)], [host(0), host(1)]])
def test_completed_description_can_be_the_next_file(seen, hosts):
    found = believed(seen, hosts, SLOW if len(hosts) == 2 else "")
    again = description.parse(found.as_text())
    assert set(again.links) == set(found.topology.links)
    assert again.hosts == found.topology.hosts
    assert discover(seen, given=again).topology == again


def test_origin_of_each_host_and_link_is_told(seen):
    devices = ", devices: [{name: gpu0, kind: gpu, workers: ['tcp://10.0.0.2:0']}]"
    measured = {("10.0.0.1", "10.0.0.3"): Measured(0.5e9, 0.001)}
    hosts = [host(0), host(1, devices), host(8, name="away")]
    notes = believed(seen, hosts, SLOW, measured=measured).notes
    assert notes[:5] == (
        "left: as the file says; its workers report also gpu0, gpu1, enp5s0, and the links"
        " numa0 - gpu0, numa0 - gpu1, numa0 - enp5s0, enp5s0 - ethernet",
        "right: as the file says; its workers report also enp5s0, and the links"
        " numa0 - gpu0, numa0 - enp5s0, enp5s0 - ethernet",
        "away: as the file says",
        "third: as its workers report",
        "links between hosts as the file says: left/numa0 - right/numa0",
    )
    assert "third: the network at 10.0.0.3 is described as it was measured" in notes


def test_networks_that_are_assumed_to_be_joined_are_told(seen):
    uplink = "{between: [third/numa0, fabric], bandwidth: 10 MB/s}"
    notes = believed(seen, [host(2)], uplink, "fabric").notes
    assert "networks that are assumed to be one: fabric - ethernet" in notes


def test_networks_that_the_file_joins_are_joined_by_it_alone(seen):
    links = (
        "{between: [third/numa0, fabric], bandwidth: 1 GB/s},"
        " {between: [ethernet, fabric], kind: wan, bandwidth: 10 MB/s}"
    )
    topology = believed(seen, [host(2)], links, "fabric, ethernet").topology
    path = topology.path("left/gpu0", "third/gpu0")
    assert (path.kind, path.bandwidth_nbytes_per_s, path.is_reported) == ("wan", 1e7, False)


def test_links_of_a_part_are_all_in_the_file_or_none(seen):
    """A link that a person left out does not return, if the file has others of that part."""
    card = ", nics: [{name: enp5s0}], links: [{between: [numa0, enp5s0], bandwidth: 1 GB/s}]"
    topology = believed(seen, [host(0, card)]).topology
    inner = [link for link in topology.links if all("left/" in end for end in link.ends)]
    assert sorted(link.name for link in inner if link.is_reported) == [
        "left/numa0 - left/gpu0",
        "left/numa0 - left/gpu1",
    ]
    assert topology.path("left/numa0", "third/numa0").bandwidth_nbytes_per_s == 1e9
