"""With `gpurt.topology.file: auto`, placement gets the machines that workers report."""

from __future__ import annotations

import asyncio

import pytest

from dask_gpurt.config import DISCOVERED, TopologySettings
from dask_gpurt.plugins.topology import cluster_machines as machines_module
from dask_gpurt.plugins.topology.cluster_machines import Machines
from tests.plugins.topology.test_cluster_machines import (
    RATE,
    Cluster,
    Learner,
    address,
    run,
    settled,
)


async def undiscovered(cluster, probe="off"):
    machines = Machines(cluster, cluster.workers.keys())
    await machines.configure(TopologySettings(DISCOVERED, None, probe))
    return machines


async def discovered(cluster, probe="off"):
    found = await undiscovered(cluster, probe)
    learner = Learner()
    found.set_learner(learner)
    await settled(found)
    return found, learner


def test_reported_machines_are_given_to_placement():
    async def go():
        cluster = Cluster(2, per_host=2)
        found, learner = await discovered(cluster)
        assert found.is_described and found.is_discovered
        assert found.summary()["file"] == DISCOVERED
        (topology,) = learner.described
        assert [host.name for host in topology.hosts] == ["10.0.0.0", "10.0.0.1"]
        await settled(found)
        assert learner.described == [topology], "nothing new"
        cluster.workers.update(Cluster(3).workers)
        await settled(found)
        assert len(learner.described[1].hosts) == 3
        assert found.topology is learner.described[1]

    run(go())


def test_workers_that_join_during_a_discovery_are_described():
    async def go():
        cluster = Cluster(1)
        found = await undiscovered(cluster)
        learner = Learner()
        found.set_learner(learner)

        def join():
            cluster.answers.clear()
            cluster.workers.update(Cluster(2).workers)
            found.workers_changed()

        cluster.answers["gpurt_machine"] = join
        await settled(found)
        assert len(found.topology.hosts) == 2

    run(go())


def test_measured_rates_describe_networks_of_unknown_speed():
    async def go():
        found, learner = await discovered(Cluster(2), probe="on")
        assert found.topology.links
        networks = [link for link in found.topology.links if link.kind == "ethernet"]
        assert {link.bandwidth_nbytes_per_s for link in networks} == {RATE}
        assert learner.described[-1] is found.topology

    run(go())


def test_machines_are_not_discovered_for_stock_placement():
    async def go():
        cluster = Cluster(2)
        found = await undiscovered(cluster)
        await settled(found)
        assert cluster.asked == []
        await found.close()

    run(go())


def test_links_are_measured_once_tasks_end(monkeypatch):
    monkeypatch.setattr(machines_module, "_RETRY_S", 0.001)

    async def go():
        cluster = Cluster(2)
        processing = cluster.workers[address(0)].processing
        processing["task"] = 1
        found, learner = await discovered(cluster, probe="auto")
        assert found.summary()["probe"]["reason"] == "tasks were running"

        measured = asyncio.Event()
        learner.observe = lambda target, rates: len(cluster.probed()) == 2 and measured.set()
        processing.clear()
        await measured.wait()
        await found.close()

    run(go())


@pytest.mark.parametrize("is_speed_reported", [True, False])
def test_many_hosts_are_measured_if_a_speed_is_missing(is_speed_reported):
    async def go():
        cluster, learner = Cluster(17), Learner()
        learner.are_links_described = lambda: is_speed_reported
        found = await undiscovered(cluster, probe="auto")
        found.set_learner(learner)
        await settled(found)
        assert bool(cluster.probed()) != is_speed_reported
        assert found.summary()["is_speed_missing"] != is_speed_reported

    run(go())


def test_discovery_that_fails_is_told(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("no such machine")

    monkeypatch.setattr(machines_module, "discover", fail)
    found, learner = run(discovered(Cluster(2)))
    assert learner.described == [] and found.topology is None
    assert "no such machine" in found.summary()["probe"]["problems"]["discovery"]
    assert "could not be described" in caplog.text


def test_discovery_at_the_end_of_the_script_is_silent(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(machines_module, "discover", fail)
    found, _ = run(discovered(Cluster(2)))
    assert not found.summary()["probe"]["problems"] and not caplog.text


# ---------------------------------------------------------------------- a file, completed

ONE_HOST = """
hosts: [{name: mine, addresses: [10.0.0.0], numa: [{name: numa0}]}]
switches: [ethernet]
links: [{between: [mine/numa0, ethernet], kind: ethernet, bandwidth: 7 GB/s}]
"""


def test_workers_complete_a_file_that_lacks_a_host():
    async def go():
        cluster, learner = Cluster(2), Learner()
        found = Machines(cluster, cluster.workers.keys())
        await found.configure(TopologySettings("one.yaml", ONE_HOST, "on"))
        assert not found.is_discovered
        assert [host.name for host in found.topology.hosts] == ["mine"]
        found.set_learner(learner)
        await settled(found)
        assert learner.described[-1] is found.topology
        assert [host.name for host in found.topology.hosts] == ["mine", "10.0.0.1"]
        assert {link.bandwidth_nbytes_per_s for link in found.topology.links} >= {7e9, RATE}
        said = found.summary()
        assert (said["file"], said["reported_hosts"]) == ("one.yaml", 1)
        told = await found.describe(probe=False)
        assert (told["file"], told["workers"]) == ("one.yaml", 2)
        assert "# mine: as the file says" in told["text"]
        assert "# 10.0.0.1: as its workers report" in told["text"]
        await found.close()

    run(go())


def test_a_file_that_changes_during_a_discovery_is_completed():
    async def go():
        cluster = Cluster(2)
        found = Machines(cluster, cluster.workers.keys())
        await found.configure(TopologySettings("one.yaml", ONE_HOST, "off"))
        found.set_learner(Learner())
        other = ONE_HOST.replace("mine", "other")

        async def change():
            cluster.answers.clear()
            await found.configure(TopologySettings("other.yaml", other, "off"))

        cluster.answers["gpurt_machine"] = change
        await settled(found)
        assert [host.name for host in found.topology.hosts] == ["other", "10.0.0.1"]

    run(go())


def test_reports_end_with_the_description():
    async def go():
        cluster = Cluster(2)
        found = Machines(cluster, cluster.workers.keys())
        await found.configure(TopologySettings("one.yaml", ONE_HOST, "off"))
        found.set_learner(Learner())

        async def forget():
            cluster.answers.clear()
            await found.configure(TopologySettings(None, None, "off"))

        cluster.answers["gpurt_machine"] = forget
        await settled(found)
        assert found.topology is None

    run(go())
