"""The manifests of `deploy/kubernetes`, read from files or rendered by kubectl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
FILES = sorted(KUBERNETES.rglob("*.yaml"))
#: On the path, or from a package of this environment.
KUBECTL = shutil.which("kubectl") or shutil.which("kubectl", path=os.path.dirname(sys.executable))


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@cache
def rendered(overlay: str) -> dict[str, Any]:
    """Return an overlay's resources by their kinds."""
    if KUBECTL is None:
        pytest.skip("kubectl is not installed, which renders the overlays")
    command = [KUBECTL, "kustomize", str(KUBERNETES / "overlays" / overlay)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    resources = list(yaml.safe_load_all(found.stdout))
    by_kind = {resource["kind"]: resource for resource in resources}
    assert len(by_kind) == len(resources)
    return by_kind


def base() -> dict[str, Any]:
    """Return the base's resources by their kinds, without kubectl."""
    return {one["kind"]: one for one in documents(KUBERNETES / "base" / "cluster.yaml")}


def cluster(resources: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of the cluster, or of the one that a job has."""
    if "DaskCluster" in resources:
        return resources["DaskCluster"]["spec"]
    return resources["DaskJob"]["spec"]["cluster"]["spec"]


def pods(resources: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the specification of each kind of pod, with its name."""
    for name in ("scheduler", "worker"):
        yield name, cluster(resources)[name]["spec"]
    if "DaskJob" in resources:
        yield "job", resources["DaskJob"]["spec"]["job"]["spec"]


def only_container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def environ(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in only_container(pod).get("env", ())}


def nbytes(quantity: str) -> int:
    """Return a quantity of Kubernetes, or of Dask, in bytes."""
    unit = {"Mi": 20, "Gi": 30}[quantity.removesuffix("B")[-2:]]
    return int(float(quantity.removesuffix("B")[:-2]) * (1 << unit))
