"""The tests' side of the small Kubernetes: starts a node, calls kubectl, connects clients.

`node.py` is the program that this module starts. The tests run outside of the node's namespaces,
and enter its network to connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import psutil
import pytest
import yaml
from distributed import Client

from tests.deploy.kubernetes.patching import Object, is_ready
from tests.deploy.manifests import KUBECTL, ROOT
from tests.limits import HANG_S

_CLONE_NEWNET = 0x40000000
#: Programs that make namespaces and networks.
_PROGRAMS = ("ip", "nsenter", "pivot_root", "prlimit", "setpriv", "unshare")
#: Makes what each node and pod has, in namespaces that end with it.
_TRIAL = (
    "ip link add one type bridge && ip link add two type veth peer name three"
    " && unshare --user --map-user=1000 --map-group=1000 true"
)
#: Where the objects of each kind are.
_KINDS = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "daskclusters": "/apis/kubernetes.dask.org/v1",
    "daskworkergroups": "/apis/kubernetes.dask.org/v1",
}
_NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child")


def missing() -> str | None:
    """Return why there can be no node on this machine, or None."""
    if os.getuid():
        return "makes namespaces, which needs root"
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            return f"needs the program {program}"
    if KUBECTL is None:
        return "needs the program kubectl"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "sh", "-c", _TRIAL], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        return f"cannot make namespaces or networks here: {tried.stderr.strip()}"
    return None


class Node:
    """A running node."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        (first,) = psutil.Process(process.pid).children()
        self._pid = first.pid

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Be in the node's network: this thread, and the threads that it starts meanwhile."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(descriptor: int) -> None:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network of the node")

        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self._pid}/ns/net") as theirs:
            enter(theirs.fileno())
            try:
                yield
            finally:
                enter(ours.fileno())

    def run(self, *command: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program on the node, with kubectl's configuration."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DASK_GPURT")}
        return subprocess.run(
            ["nsenter", "--net", "--mount", "--pid", f"--target={self._pid}", *command],
            env={**environ, "KUBECONFIG": str(self.folder / "kubeconfig")},
            input=given,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def kubectl(self, *arguments: str, given: str = "") -> str:
        """Run kubectl on the node; return what it prints."""
        ended = self.run(str(KUBECTL), *arguments, given=given)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def _ask(self, kind: str, **options: str) -> HTTPResponse:
        """Ask for all objects of a kind."""
        configuration = yaml.safe_load((self.folder / "kubeconfig").read_text())
        server = configuration["clusters"][0]["cluster"]["server"]
        url = f"{server}{_KINDS[kind]}/namespaces/default/{kind}?{urlencode(options)}"
        with self.network():
            answer: HTTPResponse = urlopen(url, timeout=HANG_S)
        return answer

    def _list(self, kind: str, labels: str) -> tuple[list[Object], str]:
        with self._ask(kind, labelSelector=labels) as answer:
            found = json.load(answer)
        return found["items"], found["metadata"]["resourceVersion"]

    def get(self, kind: str, labels: str = "") -> list[Object]:
        return self._list(kind, labels)[0]

    def until(
        self, kind: str, is_so: Callable[[list[Object]], bool], labels: str = ""
    ) -> list[Object]:
        """Watch objects until they are as wanted; return them."""
        items, version = self._list(kind, labels)
        found = {one["metadata"]["name"]: one for one in items}
        if is_so(items):
            return items
        options = {"labelSelector": labels, "resourceVersion": version, "watch": "true"}
        with self._ask(kind, **options, timeoutSeconds=str(HANG_S)) as changes:
            for event in map(json.loads, changes):
                name = event["object"]["metadata"]["name"]
                found[name] = event["object"]
                if event["type"] == "DELETED":
                    del found[name]
                if is_so(list(found.values())):
                    return list(found.values())
        raise AssertionError(f"{kind} stayed as they are: {list(found.values())}")

    def apply(self, *resources: Object) -> None:
        # kubectl itself would validate against a description of the API, which the node has not.
        options = ("--validate=false", "--filename", "-")
        self.kubectl("apply", *options, given=yaml.safe_dump_all(resources))

    def kill_pods(self) -> None:
        """Have no pod, without waiting for what pods do at their end."""
        self.kubectl("delete", "pods", "--all", "--force", "--grace-period=0")
        self.until("pods", lambda pods: not pods)

    def logs(self) -> str:
        """Return what all pods and the operator wrote, for a test that fails."""
        files = [*(self.folder / "logs").iterdir(), self.folder / "operator.log"]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in files)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Node]:
    """Start a node with the operator on it."""
    for name in ("dask_kubernetes", "aiohttp", "jsonschema"):
        pytest.importorskip(name, reason="runs dask-kubernetes and its operator")
    if (why_not := missing()) is not None:
        pytest.skip(why_not)
    # Pods find the functions of tests here, but not the package in the checkout.
    image = folder / "image"
    image.mkdir()
    for name in ("deploy", "tests"):
        (image / name).symlink_to(ROOT / name)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DASK_GPURT")}
    with (folder / "node.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", *_NAMESPACES, sys.executable, "-m", f"{__package__}.node", str(folder)],
            cwd=image,
            env={**environ, "PYTHONPATH": str(image)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "ready\n", (folder / "node.log").read_text()
        yield Node(folder, process)
    finally:
        try:
            # The node ends when its input does, and removes the control groups of its pods.
            process.communicate(timeout=HANG_S)
        finally:
            process.kill()


def is_scheduler_of(name: str) -> str:
    """Return the selector of a cluster's scheduler."""
    return f"dask.org/cluster-name={name},dask.org/component=scheduler"


@contextlib.contextmanager
def cluster(node: Node, resources: dict[str, Object], n_workers: int) -> Iterator[Client]:
    """Start a cluster as a user does; yield a client without any setting of ours."""
    name = resources["DaskCluster"]["metadata"]["name"]
    node.apply(*resources.values())
    try:
        is_it = is_scheduler_of(name)
        node.until("pods", lambda pods: any(map(is_ready, pods)), is_it)
        (service,) = node.get("services", is_it)
        address = f"tcp://{service['spec']['clusterIP']}:8786"
        with node.network():
            client = Client(address, set_as_default=False, timeout=HANG_S)
        with client:
            client.wait_for_workers(n_workers, timeout=HANG_S)
            yield client
    except BaseException:
        print(node.logs())
        raise
    finally:
        node.kubectl("delete", *(f"{kind}/{name}" for kind in resources))
        node.kill_pods()


def doctor(client: Client) -> dict[str, list[Object]]:
    """Run `dask gpurt doctor` in the pod of one worker; return its findings by their subject."""

    def inside() -> str:
        # As in a shell of the pod; the operator sets the variable.
        address = os.environ["DASK_SCHEDULER_ADDRESS"]
        command = ["dask", "gpurt", "doctor", "--json", "--scheduler", address]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    # As a task, because the worker itself has to answer the doctor meanwhile.
    said = client.submit(inside, pure=False).result(HANG_S)
    found: dict[str, list[Object]] = {}
    for finding in json.loads(said)["findings"]:
        found.setdefault(finding["what"], []).append(finding)
    return found


def addresses(client: Client) -> dict[str, str]:
    """Return the name of the pod of each worker, by the worker's address."""
    return dict(client.run(socket.gethostname))
