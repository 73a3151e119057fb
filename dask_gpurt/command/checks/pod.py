"""Checks inside a pod of Kubernetes: what the pod has, and what its manifest may lack.

A pod sees its node's `/proc`, which has none of its limits. Its control group has the limit of
memory, and the mount of `/dev/shm` has the size of shared memory.

`pod_findings` decides from plain facts; `pod_facts` reads them from this process.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dask_gpurt.command.checks.local import Finding
from dask_gpurt.command.checks.slurm import JobFacts, file_system

#: Size of `/dev/shm` in a container whose manifest does not mount it.
_DEFAULT_SHM_NBYTES = 64 << 20
#: Limit files of control groups, of version 2 and of version 1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
#: Version 1 writes the largest whole number of pages in place of no limit.
_NO_LIMIT_NBYTES = 1 << 62


@dataclass(frozen=True)
class PodFacts:
    """What the container of this process has.

    Attributes
    ----------
    n_cores
        Cores that Dask would use.
    memory_nbytes
        Limit of its control group; None without a limit.
    shm_nbytes
        Size of `/dev/shm`; None without one.
    spill_directory
        Directory in which workers keep values on disk.
    mounts
        Type of the file system of each mount point.
    """

    n_cores: int
    memory_nbytes: int | None
    shm_nbytes: int | None
    spill_directory: str
    mounts: Mapping[str, str]


def pod_findings(environ: Mapping[str, str], facts: PodFacts) -> list[Finding]:
    """Check the pod that these variables and facts describe; outside a pod, return nothing."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return []
    found = [Finding("ok", "pod", _described(environ, facts))]
    if facts.memory_nbytes is None:
        text = "this container has no memory limit: Dask takes all memory of the node for its own"
        remedy = "set resources.limits.memory of the container, and --memory-limit of its workers"
        found.append(Finding("note", "pod memory", text, remedy))
    if facts.shm_nbytes == _DEFAULT_SHM_NBYTES:
        text = (
            "/dev/shm has 64 MiB, the default: the runtime does not use it, but UCX and NCCL do"
            " between workers of one pod"
        )
        remedy = "with UCX or NCCL, mount an emptyDir with `medium: Memory` at /dev/shm"
        found.append(Finding("note", "shared memory", text, remedy))
    if file_system(facts.spill_directory, facts.mounts) == "overlay":
        text = (
            f"values would be spilled to {facts.spill_directory}, in the container's own file"
            " system (overlay)"
        )
        remedy = "mount an emptyDir, and name it in DASK_TEMPORARY_DIRECTORY or --local-directory"
        found.append(Finding("note", "spill directory", text, remedy))
    return found


def pod_facts(
    seen: JobFacts, control_group: Path = Path("/sys/fs/cgroup"), shm: str = "/dev/shm"
) -> PodFacts:
    """Return what the container of this process has.

    Parameters
    ----------
    seen
        What Dask sees in this process.
    control_group
        Folder in which the container sees its control group.
    shm
        Mount point of shared memory.
    """
    shm_nbytes: int | None
    try:
        shm_nbytes = shutil.disk_usage(shm).total
    except OSError:
        shm_nbytes = None
    memory_nbytes = _limit_nbytes(control_group)
    return PodFacts(seen.n_cores, memory_nbytes, shm_nbytes, seen.spill_directory, seen.mounts)


def _limit_nbytes(control_group: Path) -> int | None:
    for name in _LIMITS:
        try:
            text = (control_group / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT_NBYTES:
            return int(text)
    return None


def _described(environ: Mapping[str, str], facts: PodFacts) -> str:
    """Describe what the pod has. Its host name is its own, unless the manifest sets another."""
    parts = [environ.get("HOSTNAME") or "unnamed"]
    if facts.memory_nbytes is not None:
        parts.append(f"{facts.memory_nbytes >> 20} MiB")
    parts.append(f"{facts.n_cores} cores")
    if facts.shm_nbytes is not None:
        parts.append(f"/dev/shm of {facts.shm_nbytes >> 20} MiB")
    return ", ".join(parts)
