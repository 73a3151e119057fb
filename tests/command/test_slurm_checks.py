"""`dask gpurt doctor` says what a job of SLURM has, and which settings contradict it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from dask_gpurt.command.checks.slurm import (
    JobFacts,
    file_system,
    job_environ,
    job_facts,
    said_by_scontrol,
    slurm_findings,
)
from tests.command.conftest import Shell

GIB = 1 << 30
JOB = {
    "SLURM_JOB_ID": "17",
    "SLURMD_NODENAME": "n2",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_MEM_PER_NODE": "6000",
    "SLURM_JOB_GPUS": "0,1",
    "SLURM_JOB_END_TIME": "1795687200",
    "TMPDIR": "/scratch/17",
}
MOUNTS = {"/": "overlay", "/scratch": "xfs", "/home": "nfs4", "/home/me/disk": "ext4"}
SEEN = JobFacts(4, 6000 << 20, "/scratch/17/dask", MOUNTS)


def said(environ: dict[str, str], facts: JobFacts) -> dict[str, tuple[str, str, str]]:
    return {one.what: (one.level, one.text, one.remedy) for one in slurm_findings(environ, facts)}


def test_outside_a_job_nothing_is_said() -> None:
    assert slurm_findings({"TMPDIR": "/tmp"}, SEEN) == []


def test_a_job_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    (only,) = slurm_findings(JOB, SEEN)
    assert (only.level, only.what) == ("ok", "slurm job")
    assert only.text.startswith("job 17 on n2, 4 cores, 6000 MiB, GPUs 0,1, scratch /scratch/17, ")


@pytest.mark.parametrize("missing", sorted(JOB.keys() - {"SLURM_JOB_ID"}))
def test_a_job_is_described_without_a_variable(missing: str) -> None:
    environ = {name: value for name, value in JOB.items() if name != missing}
    found = slurm_findings(environ, SEEN)
    assert [one.what for one in found] == ["slurm job"]


def test_more_cores_than_the_job_has_are_a_problem() -> None:
    level, text, remedy = said(JOB, replace(SEEN, n_cores=64))["slurm cores"]
    assert level == "problem"
    assert text == "Dask sees 64 cores, and the job has 4"
    assert "--nthreads 4" in remedy


def test_more_memory_than_the_job_has_is_a_problem() -> None:
    level, text, remedy = said(JOB, replace(SEEN, memory_nbytes=64 * GIB))["slurm memory"]
    assert level == "problem"
    assert text == "Dask sees 65536 MiB of memory, and the job has 6000 MiB"
    assert '--memory-limit "6000 MiB"' in remedy


def test_memory_for_each_core_is_added_up() -> None:
    environ = {**JOB, "SLURM_MEM_PER_CPU": "1000"}
    del environ["SLURM_MEM_PER_NODE"]
    found = said(environ, replace(SEEN, memory_nbytes=64 * GIB))
    assert "the job has 8000 MiB" in found["slurm memory"][1]


def test_job_without_a_memory_limit_is_no_problem() -> None:
    environ = {**JOB, "SLURM_MEM_PER_NODE": "0"}
    assert "slurm memory" not in said(environ, replace(SEEN, memory_nbytes=64 * GIB))


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("MinMemoryNode=100M", {"SLURM_MEM_PER_NODE": "100"}),
        ("MinMemoryNode=2.50G", {"SLURM_MEM_PER_NODE": "2560"}),
        ("MinMemoryCPU=3G", {"SLURM_MEM_PER_CPU": "3072"}),
        ("MinMemoryNode=0", {}),
        ("MinMemoryNode=N/A", {}),
        ("", {}),
    ],
)
def test_memory_of_a_job_is_read_from_scontrol(memory: str, expected: dict[str, str]) -> None:
    text = f"JobId=1 JobName=bash EndTime=Unknown NumCPUs=1 MinCPUsNode=1 {memory} MinTmpDiskNode=0"
    assert said_by_scontrol(text) == expected


def test_end_of_a_job_is_read_from_scontrol() -> None:
    text = "StartTime=2026-11-26T16:36:35 EndTime=2026-11-26T16:41:35 Deadline=N/A"
    end = datetime(2026, 11, 26, 16, 41, 35).timestamp()
    assert said_by_scontrol(text) == {"SLURM_JOB_END_TIME": f"{end:.0f}"}


def test_without_scontrol_the_environment_says_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert job_environ({"SLURM_JOB_ID": "17"}) == {"SLURM_JOB_ID": "17"}
    assert job_environ({"HOME": "/"}) == {"HOME": "/"}


@pytest.mark.parametrize(
    ("tmpdir", "remedy"),
    [
        ("/scratch/17", "set temporary-directory to $TMPDIR (/scratch/17)"),
        ("/home/me/tmp", "set temporary-directory to a directory on a local disk"),
    ],
)
def test_spilling_to_a_shared_file_system_is_a_problem(tmpdir: str, remedy: str) -> None:
    found = said({**JOB, "TMPDIR": tmpdir}, replace(SEEN, spill_directory="/home/me/dask"))
    level, text, advice = found["spill directory"]
    assert level == "problem"
    assert text == "values would be spilled to /home/me/dask, which nodes share (nfs4)"
    assert advice.startswith(remedy)


def test_local_disk_below_a_shared_directory_is_no_problem() -> None:
    assert "spill directory" not in said(JOB, replace(SEEN, spill_directory="/home/me/disk/x"))


def test_facts_are_those_of_this_process() -> None:
    facts = job_facts()
    assert facts.n_cores >= 1
    assert facts.memory_nbytes > 64 << 20
    assert "/" in facts.mounts


def test_mount_points_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    lines = [b"home /mnt/f\xc3\xbcr\\040alle nfs4 rw 0 0", b"tmpfs /mnt/\xff tmpfs rw 0 0", b""]
    (tmp_path / "self" / "mounts").write_bytes(b"\n".join(lines))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    mounts = job_facts().mounts
    assert file_system("/mnt/für alle/me", mounts) == "nfs4"
    assert file_system(os.fsdecode(b"/mnt/\xff/x"), mounts) == "tmpfs"


def test_doctor_shows_the_job(shell: Shell) -> None:
    found = shell.gpurt("doctor", "--json", env={**JOB, "SLURM_MEM_PER_NODE": "100"})
    findings = {one["what"]: one for one in json.loads(found.out)["findings"]}
    assert findings["slurm job"]["text"].startswith("job 17 on n2")
    assert findings["slurm memory"]["level"] == "problem"
    assert found.code == 1
