"""One pod that has less than our manifests give it: less memory, and refused system calls.

The manifests are those of the overlay `cpu`, changed here.
"""

from __future__ import annotations

import copy
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

import dask_gpurt
from tests.deploy.kubernetes.lab import Node, addresses, cluster, doctor
from tests.deploy.kubernetes.patching import Object
from tests.deploy.kubernetes.shuffles import links, shuffle
from tests.deploy.manifests import cluster as specification
from tests.deploy.manifests import only_container, rendered
from tests.thoroughness import only_if_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LIMIT_NBYTES = 1500 << 20
#: The kernel's number for who may read a process.
_PR_SET_DUMPABLE = 4


@pytest.fixture(scope="module")
def client(node: Node, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of one pod with two workers, a system call filter, and less memory."""
    refused: str = request.param
    action = "SCMP_ACT_ERRNO"
    rules = [{"names": [refused], "action": action}]
    made = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}
    (node.folder / "seccomp" / f"no-{refused}.json").write_text(json.dumps(made))
    resources: dict[str, Object] = copy.deepcopy(rendered("cpu"))
    worker = specification(resources)["worker"]
    worker["replicas"] = 1
    container = only_container(worker["spec"])
    container["resources"]["limits"]["memory"] = f"{LIMIT_NBYTES >> 20}Mi"
    container["securityContext"]["seccompProfile"] = {
        "type": "Localhost",
        "localhostProfile": f"no-{refused}.json",
    }
    with cluster(node, resources, n_workers=2) as client:
        shuffle(client)
        yield client


def without(call: str) -> pytest.MarkDecorator:
    """Have the pod of a test refuse a system call."""
    return pytest.mark.parametrize("client", [call], indirect=True)


def assert_no_memory_is_shared(client: Client, reason: str) -> None:
    """Check that shards took another way, and that status and doctor say why."""
    found = links(client)
    assert found
    for link in found.values():
        assert link["path"] in ("ucx", "comm")
        assert link["why_not"]["shared"] == reason
    said = [finding["text"] for finding in doctor(client)["links"]]
    assert any(text.endswith(f"not in shared memory: {reason}") for text in said)


@only_if_all
@without("memfd_create")
def test_a_filter_that_refuses_memory_files(client: Client) -> None:
    assert_no_memory_is_shared(client, "no files in memory here (Operation not permitted)")


@without("ptrace")
def test_the_limit_of_the_pod_reaches_workers(client: Client) -> None:
    # The manifest gives each worker 3.5 GiB, which is more than this pod has.
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    assert {worker["memory_limit"] for worker in workers} == {LIMIT_NBYTES}
    for report in dask_gpurt.status(client)["workers"].values():
        assert report["memory"] is not None


@without("ptrace")
def test_doctor_describes_the_pod(client: Client) -> None:
    findings = doctor(client)
    (pod,) = findings["pod"]
    (name,) = set(addresses(client).values())
    assert pod["text"].startswith(f"{name}, ")
    assert findings["flag"][0]["text"].startswith("not set")
    if not has_control_group(client):
        pytest.skip("this machine allows no control group; RLIMIT_RSS limited the workers")
    assert f", {LIMIT_NBYTES >> 20} MiB, " in pod["text"]
    assert "pod memory" not in findings


def has_control_group(client: Client) -> bool:
    files = ("memory.max", "memory/memory.limit_in_bytes")

    def inside() -> bool:
        texts = [path for path in (Path("/sys/fs/cgroup", file) for file in files) if path.exists()]
        return any(path.read_text().strip() == str(LIMIT_NBYTES) for path in texts)

    return all(client.run(inside).values())


def make_unreadable() -> None:
    """Have the kernel refuse to others what ptrace would need, as some sandboxes do."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


@without("ptrace")
def test_a_kernel_that_refuses_memory_of_others(client: Client) -> None:
    assert {link["path"] for link in links(client).values()} == {"shared"}
    client.run(make_unreadable)
    # Links are made anew.
    dask_gpurt.disable(client)
    dask_gpurt.enable(client)
    shuffle(client)
    reason = "its memory is not visible here (Permission denied)"
    assert_no_memory_is_shared(client, reason)
