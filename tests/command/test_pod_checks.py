"""`dask gpurt doctor` says what a pod of Kubernetes has, and what its manifest may lack."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dask_gpurt.command.checks.pod import PodFacts, pod_facts, pod_findings
from dask_gpurt.command.checks.slurm import job_facts
from tests.command.conftest import Shell

GIB = 1 << 30
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "gpurt-worker-1"}
MOUNTS = {"/": "overlay", "/spill": "ext4", "/dev/shm": "tmpfs"}
HAS = PodFacts(4, 8 * GIB, GIB, "/spill/dask", MOUNTS)


def said(facts: PodFacts) -> dict[str, tuple[str, str, str]]:
    return {one.what: (one.level, one.text, one.remedy) for one in pod_findings(POD, facts)}


def test_outside_a_pod_nothing_is_said() -> None:
    assert pod_findings({"HOSTNAME": "n1"}, replace(HAS, memory_nbytes=None)) == []


def test_a_pod_is_described() -> None:
    (only,) = pod_findings(POD, HAS)
    assert (only.level, only.what) == ("ok", "pod")
    assert only.text == "gpurt-worker-1, 8192 MiB, 4 cores, /dev/shm of 1024 MiB"


def test_a_pod_is_described_as_far_as_it_is_known() -> None:
    facts = replace(HAS, memory_nbytes=None, shm_nbytes=None)
    first = pod_findings({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, facts)[0]
    assert first.text == "unnamed, 4 cores"


def test_a_pod_without_a_memory_limit_is_noted() -> None:
    level, text, remedy = said(replace(HAS, memory_nbytes=None))["pod memory"]
    assert level == "note"
    assert "no memory limit" in text
    assert "resources.limits.memory" in remedy


def test_shared_memory_of_default_size_is_noted() -> None:
    level, text, remedy = said(replace(HAS, shm_nbytes=64 << 20))["shared memory"]
    assert level == "note"
    assert text.startswith("/dev/shm has 64 MiB, the default: the runtime does not use it")
    assert "medium: Memory" in remedy


def test_spilling_into_the_container_itself_is_noted() -> None:
    level, text, remedy = said(replace(HAS, spill_directory="/home/dask"))["spill directory"]
    assert level == "note"
    assert text.startswith("values would be spilled to /home/dask, in the container's own")
    assert "--local-directory" in remedy


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("memory.max", "8589934592\n", 8 * GIB),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "8589934592\n", 8 * GIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("other", "1\n", None),
    ],
)
def test_memory_limit_is_that_of_the_control_group(
    tmp_path: Path, name: str, text: str, expected: int | None
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert pod_facts(job_facts(), control_group=tmp_path).memory_nbytes == expected


def test_shared_memory_has_the_size_of_its_mount(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    assert pod_facts(job_facts(), shm=str(tmp_path)).shm_nbytes == room.f_frsize * room.f_blocks
    assert pod_facts(job_facts(), shm=str(tmp_path / "absent")).shm_nbytes is None


def test_doctor_shows_the_pod(shell: Shell) -> None:
    outcome = shell.gpurt("doctor", "--json", env=POD)
    findings = {one["what"]: one for one in json.loads(outcome.out)["findings"]}
    assert findings["pod"]["text"].startswith("gpurt-worker-1, ")
    assert findings["pod"]["level"] == "ok"
