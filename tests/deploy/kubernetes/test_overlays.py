"""The other ways of the guide start clusters: a job, the autoscaler, and a program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.kubernetes.lab import Node, cluster
from tests.deploy.kubernetes.patching import Object, is_ready, value_at
from tests.deploy.kubernetes.shuffles import shuffle
from tests.deploy.manifests import ROOT, rendered
from tests.failure.gates import Gate, pass_gate
from tests.test_docs_run import blocks
from tests.thoroughness import only_if_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
WORKERS = "dask.org/component=worker"
#: Tasks of half a second, as the scheduler guesses, that need more than one worker of four threads.
N_TASKS = 24


@pytest.fixture(autouse=True)
def logs_are_shown(node: Node, request: pytest.FixtureRequest) -> Iterator[None]:
    n_failed = request.session.testsfailed
    yield
    if request.session.testsfailed > n_failed:
        print(node.logs())


@only_if_all
def test_a_job_runs_its_program_and_ends(node: Node) -> None:
    job = rendered("job")["DaskJob"]
    name = job["metadata"]["name"]
    node.apply(job)

    def has_ended(pods: list[Object]) -> bool:
        return any(value_at(pod, "status.phase") in ("Succeeded", "Failed") for pod in pods)

    (pod,) = node.until("pods", has_ended, "dask.org/component=job-runner")
    log = node.kubectl("logs", pod["metadata"]["name"])
    assert pod["status"]["phase"] == "Succeeded", log
    assert log.splitlines()[-2:] == ["499500", "{'gpurt': 1, 'stock': 0}"]
    # The cluster ends with it.
    node.until("daskclusters", lambda clusters: not clusters)
    node.kubectl("delete", f"daskjob/{name}")
    node.kill_pods()


@only_if_all
def test_the_autoscaler_adds_pods_under_load(node: Node) -> None:
    resources = rendered("autoscaled")
    resources = {**resources, "DaskAutoscaler": with_maximum(resources["DaskAutoscaler"], 2)}
    with cluster(node, resources, n_workers=1) as client, Gate() as gate:
        node.until("pods", lambda pods: len(pods) == 1, WORKERS)
        tasks = client.map(lambda number, path: pass_gate(path), range(N_TASKS), path=gate.path)
        node.until("pods", lambda pods: sum(map(is_ready, pods)) == 2, WORKERS)
        client.wait_for_workers(2)
        gate.open()
        client.gather(tasks)
        del tasks
        shuffle(client)


def with_maximum(autoscaler: Object, n_pods: int) -> Object:
    return {**autoscaler, "spec": {**autoscaler["spec"], "maximum": n_pods}}


def test_the_program_of_the_guide_starts_a_cluster(node: Node, tmp_path: Path) -> None:
    (code,) = [block.code for block in blocks(GUIDE) if "KubeCluster" in block.code]
    program = tmp_path / "program.py"
    program.write_text(code)
    ended = node.run(sys.executable, str(program))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("499500\n{'gpurt': 1, 'stock': 0}\n")
    node.until("daskclusters", lambda clusters: not clusters)
    node.kill_pods()
