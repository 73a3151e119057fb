"""Checks inside a job of SLURM: what the job has, and which settings of Dask contradict it.

SLURM tells a job in environment variables what it was given. That may be less than its node has,
and Dask does not always see it. Where SLURM confines jobs by counting alone, Dask sees all cores
and all memory of the node. SLURM ends the job that uses them.

`slurm_findings` decides from plain facts; `job_facts` reads them from this process. `job_environ`
asks SLURM for facts that the environment lacks. Older versions leave out the end of a job, and the
memory where `srun` started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import dask.config
import psutil

from dask_gpurt import config
from dask_gpurt.command.checks.local import Finding
from dask_gpurt.errors import ConfigError

#: File systems that several nodes share.
_SHARED = {"nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "cifs", "fuse.sshfs", "orangefs"}
#: Variables that name a local directory of the job, by their usual names.
_SCRATCH = ("SLURM_TMPDIR", "LOCAL_SCRATCH", "TMPDIR")
#: Variables that some versions do not set, and fields of `scontrol show job` with the memory.
_ON_REQUEST = ("SLURM_JOB_END_TIME", "SLURM_MEM_PER_NODE")
_MEMORY = {"MinMemoryNode": "SLURM_MEM_PER_NODE", "MinMemoryCPU": "SLURM_MEM_PER_CPU"}
_ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class JobFacts:
    """What Dask sees in this process.

    Attributes
    ----------
    n_cores
        Cores that Dask would use.
    memory_nbytes
        Memory that Dask would use.
    spill_directory
        Directory in which workers keep values on disk.
    mounts
        Type of the file system of each mount point.
    """

    n_cores: int
    memory_nbytes: int
    spill_directory: str
    mounts: Mapping[str, str]


def slurm_findings(environ: Mapping[str, str], facts: JobFacts) -> list[Finding]:
    """Check the job that these environment variables describe; without a job, return nothing."""
    if "SLURM_JOB_ID" not in environ:
        return []
    found = [Finding("ok", "slurm job", _described(environ))]
    n_cores, memory_nbytes = _n_cores(environ), _memory_nbytes(environ)
    if n_cores is not None and n_cores < facts.n_cores:
        text = f"Dask sees {facts.n_cores} cores, and the job has {n_cores}"
        remedy = f"start workers with --nthreads {n_cores}; SLURMCluster(cores={n_cores}) does so"
        found.append(Finding("problem", "slurm cores", text, remedy))
    if memory_nbytes is not None and memory_nbytes < 0.95 * facts.memory_nbytes:
        mib = memory_nbytes >> 20
        text = f"Dask sees {facts.memory_nbytes >> 20} MiB of memory, and the job has {mib} MiB"
        remedy = f'start workers with --memory-limit "{mib} MiB", or SLURM may end the job'
        found.append(Finding("problem", "slurm memory", text, remedy))
    kind = file_system(facts.spill_directory, facts.mounts)
    if kind in _SHARED:
        text = f"values would be spilled to {facts.spill_directory}, which nodes share ({kind})"
        found.append(Finding("problem", "spill directory", text, _local_directory(environ, facts)))
    return found


def job_environ(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with what SLURM says about the job on request."""
    job = environ.get("SLURM_JOB_ID")
    if job is None or all(name in environ for name in _ON_REQUEST):
        return environ
    try:
        command = ["scontrol", "--oneliner", "show", "job", job]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return environ
    return {**said_by_scontrol(asked.stdout), **environ}


def said_by_scontrol(text: str) -> dict[str, str]:
    """Return what `scontrol show job` says, as the environment variables of newer versions."""
    said = dict(re.findall(r"(\w+)=(\S+)", text))
    found = {}
    if (end := said.get("EndTime")) is not None:
        with contextlib.suppress(ValueError):  # such as Unknown
            found["SLURM_JOB_END_TIME"] = f"{datetime.fromisoformat(end).timestamp():.0f}"
    for field, name in _MEMORY.items():
        if amount := re.fullmatch(r"(\d+(?:\.\d+)?)([MGT])", said.get(field, "")):
            mib = float(amount[1]) * (1 << {"M": 0, "G": 10, "T": 20}[amount[2]])
            found[name] = str(int(mib))
    return found


def job_facts() -> JobFacts:
    """Return what Dask sees in this process."""
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT

    directory = None
    with contextlib.suppress(ConfigError):  # `local` reports it
        directory = config.read().memory.directory
    directory = directory or dask.config.get("temporary-directory", None) or "."
    mounts = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    path = os.path.expanduser(directory)
    with contextlib.suppress(FileNotFoundError):  # `local` reports a working directory that is gone
        path = os.path.abspath(path)
    return JobFacts(int(CPU_COUNT), int(MEMORY_LIMIT), path, mounts)


def _described(environ: Mapping[str, str]) -> str:
    """Describe what the job has, as far as SLURM says it."""
    parts = [f"job {environ['SLURM_JOB_ID']}"]
    if "SLURMD_NODENAME" in environ:
        parts[0] += f" on {environ['SLURMD_NODENAME']}"
    if (n_cores := _n_cores(environ)) is not None:
        parts.append(f"{n_cores} core" + "s" * (n_cores != 1))
    if (memory_nbytes := _memory_nbytes(environ)) is not None:
        parts.append(f"{memory_nbytes >> 20} MiB")
    gpus = environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS")
    if gpus:
        parts.append(f"GPUs {gpus}")
    scratch = next((environ[name] for name in _SCRATCH if environ.get(name)), None)
    if scratch is not None:
        parts.append(f"scratch {scratch}")
    if (end := environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        parts.append(f"until {datetime.fromtimestamp(int(end)):%Y-%m-%d %H:%M}")
    return ", ".join(parts)


def _n_cores(environ: Mapping[str, str]) -> int | None:
    """Return the cores of one task of the job; None if SLURM does not say."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def _memory_nbytes(environ: Mapping[str, str]) -> int | None:
    """Return the memory of the job on this node; None if SLURM does not say or limits none."""
    of_node, of_core = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_MEM_PER_CPU", "")
    n_cores = environ.get("SLURM_CPUS_ON_NODE", "")
    mib = 0
    if of_node.isdigit():
        mib = int(of_node)
    elif of_core.isdigit() and n_cores.isdigit():
        mib = int(of_core) * int(n_cores)
    return mib << 20 or None


def file_system(path: str, mounts: Mapping[str, str]) -> str | None:
    """Return the type of the file system that a path is on."""
    place = Path(path)
    for point in (place, *place.parents):
        if str(point) in mounts:
            return mounts[str(point)]
    return None


def _local_directory(environ: Mapping[str, str], facts: JobFacts) -> str:
    for name in _SCRATCH:
        path = environ.get(name)
        if path and file_system(path, facts.mounts) not in _SHARED:
            return f"set temporary-directory to ${name} ({path}), which is local to the node"
    return "set temporary-directory to a directory on a local disk of the node"
