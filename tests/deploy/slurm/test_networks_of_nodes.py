"""Nodes in two network namespaces are two hosts, although they run on one machine."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import pytest

import dask_gpurt
from dask_gpurt.topology import description
from tests.deploy.slurm.job_cluster import JobCluster, cluster_of_jobs, frames
from tests.deploy.slurm.networks import two_networks
from tests.deploy.slurm.throwaway import running_slurm
from tests.integration.comparing import assert_same_partitions, collection, partitions

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def jobs() -> Iterator[JobCluster]:
    with two_networks() as networks, running_slurm(networks.nodes, networks.address) as slurm:
        scheduler = {"interface": networks.bridge, "dashboard_address": ":0"}
        options = {"interface": "eth0", "scheduler_options": scheduler}
        with cluster_of_jobs(slurm, 2, **options) as started:
            yield started


def test_two_network_namespaces_are_two_hosts(jobs: JobCluster) -> None:
    addresses = {address.split("://")[1].split(":")[0] for address in jobs.jobs()}
    assert len(addresses) == 2
    found = jobs.client.sync(jobs.client.scheduler.gpurt_topology, probe=False)
    hosts = description.parse(found["text"]).hosts
    assert {host.addresses for host in hosts} == {(address,) for address in addresses}
    assert dask_gpurt.status(jobs.client)["topology"]["hosts"] == 2


def test_a_shuffle_between_two_networks_is_right(jobs: JobCluster) -> None:
    got = partitions(jobs.client, collection(frames()).shuffle("key"))
    status = dask_gpurt.status(jobs.client)
    assert status["runs"] == {"gpurt": 1, "stock": 0}
    dask_gpurt.disable(jobs.client)
    assert_same_partitions(got, partitions(jobs.client, collection(frames()).shuffle("key")))


def test_ucx_takes_the_interface_of_the_jobs(jobs: JobCluster) -> None:
    pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    with dask.config.set({"gpurt.enabled": True, "gpurt.shuffle.transport": "ucx"}):
        dask_gpurt.enable(jobs.client)
    got = partitions(jobs.client, collection(frames()).shuffle("key"))
    workers = dask_gpurt.status(jobs.client)["workers"].values()
    assert {link["path"] for worker in workers for link in worker["links"].values()} == {"ucx"}
    dask_gpurt.disable(jobs.client)
    assert_same_partitions(got, partitions(jobs.client, collection(frames()).shuffle("key")))
