"""Makes pods for deployments, and runs the container of each pod.

It follows the events of `objects.py`, in place of Kubernetes' controllers, scheduler, kubelet and
service network. `sandbox.py` says how a container is run.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.deploy.kubernetes.objects import (
    DASK_CLUSTERS,
    DEPLOYMENTS,
    PODS,
    SERVICES,
    Event,
    Objects,
    is_owned,
    now,
)
from tests.deploy.kubernetes.patching import Object, is_ready, labels_of, merged, value_at
from tests.deploy.kubernetes.sandbox import (
    NETWORK_BITS,
    ControlGroup,
    Sandbox,
    connect_network,
    nbytes,
    open_network,
)

#: Seconds that a container has to end, where its pod names none.
_GRACE_S = 30
#: Seconds between two questions whether a container is ready.
_PROBE_EVERY_S = 0.1
#: Seconds before a container that has ended is started again.
_RESTART_AFTER_S = 1.0


async def run_ip(commands: list[str], network: str | None = None) -> None:
    """Have `ip` carry out these commands, in a network of a pod or in that of the node."""
    options = ["-batch", "-"] if network is None else ["-n", network, "-batch", "-"]
    running = await asyncio.create_subprocess_exec("ip", *options, stdin=asyncio.subprocess.PIPE)
    await running.communicate("\n".join(commands).encode())
    assert running.returncode == 0, commands


class Kubelet:
    """Runs pods.

    Parameters
    ----------
    folder
        Folder of the node: its logs, the folders of its pods, and its system call filters.
    environ
        Variables that each container inherits.
    """

    def __init__(self, objects: Objects, folder: Path, environ: Mapping[str, str]) -> None:
        self._objects = objects
        self._folder = folder
        self._environ = environ
        self._numbers = itertools.count(1)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._grace_s: dict[str, float] = {}
        #: Network namespace and labels of each running pod.
        self._networks: dict[str, tuple[str, Object]] = {}
        for name in ("logs", "pods", "seccomp"):
            (folder / name).mkdir()

    async def follow(self) -> None:
        """Act on all changes, until cancelled or until something fails."""
        async with asyncio.TaskGroup() as pods:
            async for event in self._objects.events(0):
                await self._act(event, pods)

    async def _act(self, event: Event, pods: asyncio.TaskGroup) -> None:
        one, meta = event.one, event.one["metadata"]
        if event.resource == SERVICES:
            self._write_hosts()
            await self._give_addresses()
        elif event.resource == DEPLOYMENTS and event.what != "DELETED":
            await self._make_pods(one)
        elif event.resource == DASK_CLUSTERS and value_at(one, "status.phase") == "Pending":
            await self._publish_services(one)
        elif event.resource == PODS and event.what == "ADDED":
            running = pods.create_task(self._run(one, next(self._numbers)))
            self._running[meta["uid"]] = running
            pods.create_task(self._confirm_end(one, running))
        elif event.resource == PODS:
            if "deletionTimestamp" in meta and event.what != "DELETED":
                self._stop(one)
            for owner in self._objects.select(DEPLOYMENTS, meta["namespace"]):
                if is_owned(one, owner):
                    await self._make_pods(owner)

    async def _publish_services(self, cluster: Object) -> None:
        """Give the services of a cluster their status, which makes the operator call it running.

        Kubernetes has this status as soon as a service is there. But the operator may then write
        `Running` before its own `Pending`, and the cluster stays pending (dask-kubernetes#968).
        """
        for service in self._objects.select(SERVICES, cluster["metadata"]["namespace"]):
            if is_owned(service, cluster):
                await self._objects.update(
                    SERVICES,
                    service["metadata"]["namespace"],
                    service["metadata"]["name"],
                    lambda one: merged(one, {"status": {"loadBalancer": {}}}),
                    only_status=True,
                )

    def _stop(self, pod: Object) -> None:
        meta = pod["metadata"]
        grace_s = pod["spec"].get("terminationGracePeriodSeconds", _GRACE_S)
        grace_s = meta.get("deletionGracePeriodSeconds", grace_s)
        if self._grace_s.get(meta["uid"]) != grace_s:
            self._grace_s[meta["uid"]] = grace_s
            self._running[meta["uid"]].cancel()

    def _write_hosts(self) -> None:
        """Let all find services by their names."""
        lines = ["127.0.0.1 localhost"]
        for service in self._objects.select(SERVICES):
            meta = service["metadata"]
            name = f"{meta['name']}.{meta['namespace']}"
            address = service["spec"]["clusterIP"]
            lines.append(f"{address} {name} {name}.svc {name}.svc.cluster.local")
        # In place, because pods have this very file mounted; and never empty meanwhile.
        text = ("\n".join(lines) + "\n").encode()
        with open("/etc/hosts", "r+b", buffering=0) as file:
            file.write(text)
            file.truncate()

    async def _give_addresses(self) -> None:
        """Give each pod the addresses of the services that select it."""
        for service in self._objects.select(SERVICES):
            wanted = (service["spec"].get("selector") or {}).items()
            address = f"{service['spec']['clusterIP']}/{NETWORK_BITS}"
            for network, labels in list(self._networks.values()):
                if wanted and wanted <= labels.items():
                    await run_ip([f"addr replace {address} dev eth0"], network)

    async def _make_pods(self, deployment: Object) -> None:
        meta, spec = deployment["metadata"], deployment["spec"]
        namespace = meta["namespace"]
        if not self._objects.has(DEPLOYMENTS, namespace, meta["name"]):
            return
        pods = [
            one
            for one in self._objects.select(PODS, namespace)
            if is_owned(one, deployment) and "deletionTimestamp" not in one["metadata"]
        ]
        for _ in range(spec.get("replicas", 1) - len(pods)):
            template = copy.deepcopy(spec["template"])
            reference = {"kind": "Deployment", "name": meta["name"], "uid": meta["uid"]}
            owner = {"apiVersion": "apps/v1", "controller": True, **reference}
            of_pod = template.get("metadata", {})
            of_pod |= {"generateName": f"{meta['name']}-", "ownerReferences": [owner]}
            of_pod.pop("name", None)
            pod = {"metadata": of_pod, "spec": template["spec"]}
            await self._objects.create(PODS, namespace, pod)
        n_ready = sum(map(is_ready, pods))
        numbers = {"replicas": len(pods), "readyReplicas": n_ready, "availableReplicas": n_ready}
        await self._objects.update(
            DEPLOYMENTS,
            namespace,
            meta["name"],
            lambda one: merged(one, {"status": numbers}),
            only_status=True,
        )

    async def _report(self, pod: Object, **status: Any) -> None:
        where = PODS, pod["metadata"]["namespace"], pod["metadata"]["name"]
        await self._objects.update(
            *where, lambda one: merged(one, {"status": status}), only_status=True
        )

    async def _confirm_end(self, pod: Object, running: asyncio.Task[None]) -> None:
        """Let go of a pod when its container has ended."""
        await asyncio.wait({running})
        where = PODS, pod["metadata"]["namespace"], pod["metadata"]["name"]
        await self._objects.update(
            *where, lambda one: merged(one, {"metadata": {"finalizers": None}})
        )

    async def _run(self, pod: Object, number: int) -> None:
        """Run a pod until it has ended or is deleted."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        address, network = f"10.244.{number // 250}.{number % 250 + 1}", f"pod{number}"
        folder = self._folder / "pods" / name
        folder.mkdir()
        limit = value_at(pod["spec"]["containers"][0], "resources.limits.memory")
        group = None
        if limit is not None:
            group = ControlGroup.make(f"gpurt-{uid}", nbytes(str(limit)))
        sandbox = Sandbox(pod, address, folder, self._folder / "seccomp", group)
        connecting = asyncio.create_task(self._connect(pod, network, number, address))
        try:
            # Shielded: a network is made whole, although its pod is deleted meanwhile.
            await asyncio.shield(connecting)
            for n_restarts in itertools.count():
                exit_code = await self._run_once(sandbox, network, n_restarts)
                policy = pod["spec"].get("restartPolicy", "Always")
                if policy == "Never" or (policy == "OnFailure" and not exit_code):
                    phase = "Failed" if exit_code else "Succeeded"
                    await self._report(pod, phase=phase, conditions=_conditions(False))
                    return
                await asyncio.sleep(_RESTART_AFTER_S)
        finally:
            # First, because a second request to end may interrupt what waits.
            if group is not None:
                group.remove()
            await connecting
            del self._networks[uid]
            await run_ip([f"netns del {network}"])

    async def _connect(self, pod: Object, network: str, number: int, address: str) -> None:
        """Make a pod's network."""
        await run_ip(connect_network(network, f"veth{number}"))
        await run_ip(open_network(address), network)
        self._networks[pod["metadata"]["uid"]] = (network, labels_of(pod))
        await self._give_addresses()

    async def _run_once(self, sandbox: Sandbox, network: str, n_restarts: int) -> int:
        """Run a pod's container once; return its exit code."""
        pod, container = sandbox.pod, sandbox.container
        log = (self._folder / "logs" / f"{pod['metadata']['name']}.log").open("ab")
        with log:
            process = await asyncio.create_subprocess_exec(
                *sandbox.command(network, self._environ),
                env=sandbox.environ(self._environ),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        status = {
            "name": container["name"],
            "restartCount": n_restarts,
            "image": "",
            "imageID": "",
            "state": {"running": {"startedAt": now()}},
        }

        async def report(is_ready: bool) -> None:
            await self._report(
                pod,
                phase="Running",
                podIP=sandbox.address,
                startTime=now(),
                conditions=_conditions(is_ready),
                containerStatuses=[{**status, "ready": is_ready}],
            )

        try:
            if sandbox.group is not None:
                sandbox.group.add(process.pid)
            assert process.stdin is not None
            process.stdin.write(b"ready\n")
            process.stdin.close()
            await report(False)
            await self._until_ready(sandbox, process)
            await report(True)
            return await process.wait()
        finally:
            await self._end(process, self._grace_s.get(pod["metadata"]["uid"], 0))

    async def _until_ready(self, sandbox: Sandbox, process: asyncio.subprocess.Process) -> None:
        """Wait until the container is ready, or has ended."""
        probe = value_at(sandbox.container, "readinessProbe.httpGet")
        if probe is None:
            return
        ports = {one["name"]: one["containerPort"] for one in sandbox.container["ports"]}
        url = f"http://{sandbox.address}:{ports.get(probe['port'], probe['port'])}{probe['path']}"
        limit = aiohttp.ClientTimeout(total=1)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as answer:
                        if answer.status < 400:
                            return
                await asyncio.sleep(_PROBE_EVERY_S)

    async def _end(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        """Ask a container to end; kill it after some time."""
        if process.returncode is not None:
            return
        # The child is the container's first process: all others end with it, and `unshare` after.
        first = [*psutil.Process(process.pid).children(), psutil.Process(process.pid)][0]
        try:
            if grace_s:
                first.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), grace_s)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                first.kill()
            await process.wait()


def _conditions(is_ready: bool) -> list[Object]:
    kinds = {"PodScheduled": True, "Initialized": True, "ContainersReady": is_ready}
    found = {**kinds, "Ready": is_ready}
    return [{"type": kind, "status": str(holds)} for kind, holds in found.items()]
