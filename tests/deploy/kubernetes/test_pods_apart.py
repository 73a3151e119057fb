"""Two pods on one node, each with two workers: who shares memory with whom, and what is said.

The manifests are those of the overlay `cpu`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from distributed import Client

from tests.deploy.kubernetes.lab import Node, addresses, cluster, doctor
from tests.deploy.kubernetes.shuffles import links, shuffle
from tests.deploy.manifests import rendered

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ELSEWHERE = "it runs in another container, or on another host"


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[Client]:
    with cluster(node, rendered("cpu"), n_workers=4) as client:
        shuffle(client)
        yield client


def namespaces(kind: str) -> str:
    return os.readlink(f"/proc/self/ns/{kind}")


def test_pods_are_apart_and_their_workers_together(client: Client) -> None:
    pods = addresses(client)
    for kind in ("net", "pid", "mnt", "uts", "ipc", "user"):
        seen = client.run(namespaces, kind)
        assert len({*seen.values(), namespaces(kind)}) == 3, kind
        assert len({(pods[worker], inside) for worker, inside in seen.items()}) == 2, kind
    # The users of our images, without a right of root's.
    assert set(client.run(os.getuid).values()) == {1000}


def test_two_pods_on_one_node_share_no_memory(client: Client) -> None:
    pods = addresses(client)
    paths: dict[bool, set[str]] = {True: set(), False: set()}
    for (one, other), link in links(client).items():
        is_one_pod = pods[one] == pods[other]
        paths[is_one_pod].add(link["path"])
        if not is_one_pod:
            assert link["why_not"]["shared"] == ELSEWHERE
    assert paths[True] == {"shared"}
    assert paths[False] <= {"ucx", "comm"}
    assert paths[False]


def test_doctor_says_that_pods_share_no_memory(client: Client) -> None:
    findings = doctor(client)["links"]
    assert any("of workers exchange in shared memory" in one["text"] for one in findings)
    (note,) = [one for one in findings if "not in shared memory" in one["text"]]
    assert note["text"].endswith(f": {ELSEWHERE}")
    assert "--nworkers" in note["remedy"]
