"""The program that is the small Kubernetes: its API, its pods, and the operator of dask-kubernetes.

    python -m tests.deploy.kubernetes.node FOLDER

`lab.py` starts it in new namespaces for network, mounts and processes, so its ports and its file
`/etc/hosts` are its own, and nothing of it outlives it. It prints a line when it serves, and ends
when its input does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask_kubernetes
import yaml
from aiohttp import web

from tests.deploy.kubernetes.api import Api
from tests.deploy.kubernetes.kubelet import Kubelet, run_ip
from tests.deploy.kubernetes.objects import DEFINITIONS, Objects, Resource
from tests.deploy.kubernetes.sandbox import make_bridge

NAMESPACE = "default"
#: Name of the file with which clients find the API.
KUBECONFIG = "kubeconfig"
OPERATOR_LOG = "operator.log"

#: Folders of the machine that the node has of its own.
_OWN_FOLDERS = ("proc", "run")


def definitions() -> list[dict[str, Any]]:
    """Return the definitions of custom resources that the operator's package carries."""
    deployment = Path(dask_kubernetes.__file__).parent / "operator" / "deployment"
    found: list[dict[str, Any]] = []
    for path in sorted(deployment.glob("helm/*/crds/*.yaml")):
        with path.open(encoding="utf-8") as file:
            found += yaml.load_all(file, Loader=yaml.CSafeLoader)
    return found


def take_own_root(folder: Path) -> None:
    """Give this process, and all that it starts, a root folder of its own.

    It has all folders of the machine. Mount points of pods can be made in it, and services be
    written into `/etc/hosts`, without a change of the machine.
    """
    root = folder / "root"
    root.mkdir()

    def run(*command: object) -> None:
        subprocess.run([str(part) for part in command], check=True)

    run("mount", "-t", "tmpfs", "tmpfs", root)
    for entry in Path("/").iterdir():
        inside = root / entry.name
        if entry.is_symlink():
            inside.symlink_to(entry.readlink())
        elif entry.name in _OWN_FOLDERS:
            inside.mkdir()
        elif entry.is_dir():
            inside.mkdir()
            run("mount", "--rbind", entry, inside)
    run("mount", "-t", "proc", "proc", root / "proc")
    # No name server answers, so a name that is not in the file is refused at once.
    files = {"hosts": "127.0.0.1 localhost", "resolv.conf": "nameserver 127.0.0.1"}
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
        inside = root / "etc" / name
        # A link leads into a folder that is not there, which has the same effect.
        if not inside.is_symlink():
            run("mount", "--bind", folder / name, inside)
    old = root / "old"
    old.mkdir()
    run("pivot_root", root, old)
    run("umount", "--lazy", "/old")


async def serve(folder: Path) -> None:
    """Serve until the input ends."""
    await run_ip(make_bridge())
    objects = Objects()
    namespaces = Resource("v1", "namespaces")
    await objects.create(namespaces, None, {"metadata": {"name": NAMESPACE}})
    for definition in definitions():
        await objects.create(DEFINITIONS, None, definition)
    kubelet = Kubelet(objects, folder, os.environ)
    runner = web.AppRunner(Api(objects, folder / "logs").application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (folder / KUBECONFIG).write_text(yaml.safe_dump(_configuration(runner.addresses[0][1])))
    following = asyncio.create_task(kubelet.follow())
    operator = await _start_operator(folder)
    print("ready", flush=True)
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({following, reading}, return_when=asyncio.FIRST_COMPLETED)
    operator.kill()
    if not following.done():
        following.cancel()
        await asyncio.wait({following})
    else:
        following.result()


async def _start_operator(folder: Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "kopf", "run", "-m", "dask_kubernetes.operator.controller"]
    with (folder / OPERATOR_LOG).open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *command,
            "--standalone",
            "--namespace",
            NAMESPACE,
            env={**os.environ, "KUBECONFIG": str(folder / KUBECONFIG)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _configuration(port: int) -> dict[str, Any]:
    context = {"cluster": "small", "user": "anybody", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "small",
        "clusters": [{"name": "small", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "anybody", "user": {"token": "none"}}],
        "contexts": [{"name": "small", "context": context}],
    }


if __name__ == "__main__":
    here = Path(sys.argv[1])
    take_own_root(here)
    # The folder that this was started in is under the old root.
    os.chdir(here)
    asyncio.run(serve(here))
