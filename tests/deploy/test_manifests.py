"""The manifests for Kubernetes are valid, agree with one another, and set what workers need."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import (
    FILES,
    KUBERNETES,
    OVERLAYS,
    base,
    cluster,
    documents,
    environ,
    nbytes,
    only_container,
    pods,
    rendered,
)

#: Version of Kubernetes for whose schemas pods and services are valid.
VALID_FOR = "1.36"
#: `dask cuda` comes with dask-cuda, which only the image for GPUs has.
DASK_CUDA = "cuda"


def name_of(path: Path) -> str:
    return str(path.relative_to(KUBERNETES))


@pytest.fixture(params=["base", *OVERLAYS])
def resources(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the base as it is written, and each overlay as kubectl renders it."""
    return base() if request.param == "base" else rendered(request.param)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_each_manifest_is_one_document(path: Path) -> None:
    (document,) = documents(path)
    assert isinstance(document, list) or {"apiVersion", "kind"} <= document.keys()


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name == "kustomization.yaml"], ids=name_of
)
def test_kustomizations_name_files_that_exist(path: Path) -> None:
    (document,) = documents(path)
    named = [*document.get("resources", ()), *document.get("components", ())]
    named += [patch["path"] for patch in document.get("patches", ()) if "path" in patch]
    assert named
    for name in named:
        target = path.parent / name
        assert target.is_file() or (target / "kustomization.yaml").is_file(), name


def test_no_manifest_is_left_out() -> None:
    named = set()
    for path in FILES:
        if path.name == "kustomization.yaml":
            (document,) = documents(path)
            named |= {path, *(path.parent / name for name in document["resources"])}
            patches = document.get("patches", ())
            named |= {path.parent / patch["path"] for patch in patches if "path" in patch}
    assert set(FILES) <= named


@pytest.mark.parametrize(
    "path", [path for path in FILES if isinstance(documents(path)[0], list)], ids=name_of
)
def test_patches_change_what_the_base_has(path: Path) -> None:
    (operations,) = documents(path)
    for operation in operations:
        *parents, last = operation["path"].split("/")[1:]
        place: Any = base()["DaskCluster"]
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        assert last == "-" if operation["op"] == "add" else last in place


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_render_to_the_resources_they_are_for(name: str) -> None:
    kinds = {"autoscaled": {"DaskAutoscaler", "DaskCluster"}, "job": {"DaskJob"}}
    assert rendered(name).keys() == kinds.get(name, {"DaskCluster"})


def test_resources_are_valid_for_the_operator(resources: dict[str, Any]) -> None:
    reason = "validates against the definitions of dask-kubernetes"
    package = pytest.importorskip("dask_kubernetes", reason=reason)
    jsonschema = pytest.importorskip("jsonschema", reason=reason)
    schemas = {}
    deployment = Path(package.__file__).parent / "operator" / "deployment"
    for path in deployment.glob("helm/*/crds/*.yaml"):
        for definition in documents(path):
            (version,) = definition["spec"]["versions"]
            schemas[definition["spec"]["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    assert resources
    for kind, resource in resources.items():
        schema = strict(schemas[kind]["properties"]["spec"])
        jsonschema.Draft202012Validator(schema).validate(resource["spec"])


def test_pods_and_services_are_valid_for_kubernetes(resources: dict[str, Any]) -> None:
    reason = "validates against the schemas of Kubernetes"
    validator = pytest.importorskip("kubernetes_validate", reason=reason)
    own = {"apiVersion": "v1", "metadata": {"name": "one"}}
    objects = [{**own, "kind": "Pod", "spec": pod} for _, pod in pods(resources)]
    service = cluster(resources)["scheduler"]["service"]
    for one in [*objects, {**own, "kind": "Service", "spec": service}]:
        # It raises for what is not valid, unknown fields included.
        assert validator.validate(one, VALID_FOR, strict=True) == VALID_FOR


def test_a_pod_with_an_unknown_field_is_not_valid() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    pod = dict(next(pods(base()))[1], unknown=1)
    one = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}
    with pytest.raises(validator.ValidationError):
        validator.validate(one, VALID_FOR, strict=True)


def strict(schema: Any) -> Any:
    """Return a schema of Kubernetes as JSON schema, which also refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    made = {name: strict(value) for name, value in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        made["additionalProperties"] = "x-kubernetes-preserve-unknown-fields" in schema
    return made


def test_each_container_has_limits(resources: dict[str, Any]) -> None:
    for name, pod in pods(resources):
        limits = only_container(pod)["resources"]["limits"]
        assert {"memory", "ephemeral-storage"} <= limits.keys(), name


def test_no_container_runs_as_root(resources: dict[str, Any]) -> None:
    for name, pod in pods(resources):
        context = only_container(pod)["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name


def test_the_scheduler_sets_the_flag(resources: dict[str, Any]) -> None:
    assert environ(cluster(resources)["scheduler"]["spec"])["DASK_GPURT__ENABLED"] == "true"


def test_commands_are_those_that_dask_has(resources: dict[str, Any]) -> None:
    commands = {entry.name for entry in entry_points(group="dask_cli")}
    for name in ("scheduler", "worker"):
        first, command = only_container(cluster(resources)[name]["spec"])["args"][:2]
        assert first == "dask"
        assert command in commands | {DASK_CUDA}
    image = only_container(cluster(resources)["worker"]["spec"])["image"]
    assert (command == DASK_CUDA) == ("rapids" in image)


def test_ports_of_the_service_are_ports_of_the_scheduler(resources: dict[str, Any]) -> None:
    scheduler = cluster(resources)["scheduler"]
    container = only_container(scheduler["spec"])
    has = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in scheduler["service"]["ports"]:
        assert has[port["targetPort"]] == port["port"]
    arguments = container["args"]
    assert arguments[arguments.index("--port") + 1] == str(has["tcp-comm"])
    assert container["readinessProbe"]["httpGet"]["port"] in has


@pytest.mark.parametrize("name", ["scheduler", "worker"])
def test_prometheus_reads_the_dashboards_port(resources: dict[str, Any], name: str) -> None:
    one = cluster(resources)[name]
    annotations, container = one["metadata"]["annotations"], only_container(one["spec"])
    (port,) = [port for port in container["ports"] if port["name"] == "http-dashboard"]
    arguments = container["args"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert arguments[arguments.index("--dashboard-address") + 1] == f":{port['containerPort']}"


def test_the_service_selects_the_scheduler_by_its_name(resources: dict[str, Any]) -> None:
    named = resources.get("DaskJob") or resources["DaskCluster"]
    selector = cluster(resources)["scheduler"]["service"]["selector"]
    assert selector["dask.org/cluster-name"] == named["metadata"]["name"]
    if "DaskAutoscaler" in resources:
        assert resources["DaskAutoscaler"]["spec"]["cluster"] == named["metadata"]["name"]


def test_workers_spill_to_a_volume_within_the_limit(resources: dict[str, Any]) -> None:
    pod = cluster(resources)["worker"]["spec"]
    container, arguments = only_container(pod), only_container(pod)["args"]
    assert arguments[arguments.index("--local-directory") + 1] == "$(DASK_TEMPORARY_DIRECTORY)"
    directory = environ(pod)["DASK_TEMPORARY_DIRECTORY"]
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == directory]
    (volume,) = [one["emptyDir"] for one in pod["volumes"] if one["name"] == mount["name"]]
    assert "medium" not in volume
    limit = container["resources"]["limits"]["ephemeral-storage"]
    assert nbytes(volume["sizeLimit"]) < nbytes(limit)


def test_workers_fit_into_their_pod(resources: dict[str, Any]) -> None:
    pod = cluster(resources)["worker"]["spec"]
    container, arguments = only_container(pod), only_container(pod)["args"]
    limits = container["resources"]["limits"]
    n_workers = int(limits.get("nvidia.com/gpu", 1))
    if "--nworkers" in arguments:
        n_workers = int(arguments[arguments.index("--nworkers") + 1])
    of_each = nbytes(arguments[arguments.index("--memory-limit") + 1])
    in_memory = [one["emptyDir"] for one in pod["volumes"] if one["emptyDir"].get("medium")]
    taken = sum(nbytes(volume["sizeLimit"]) for volume in in_memory)
    assert n_workers * of_each + taken < nbytes(limits["memory"])


def test_an_autoscaled_pod_has_one_worker() -> None:
    worker = only_container(cluster(rendered("autoscaled"))["worker"]["spec"])
    assert "--nworkers" not in worker["args"]


def test_an_autoscaled_cluster_begins_with_its_least_size() -> None:
    # A pod that the operator removes before its worker has connected stays, uncounted.
    resources = rendered("autoscaled")
    least = resources["DaskAutoscaler"]["spec"]["minimum"]
    assert cluster(resources)["worker"]["replicas"] == least


def test_only_workers_of_the_gpu_overlay_have_gpus() -> None:
    for overlay in OVERLAYS:
        for name, pod in pods(rendered(overlay)):
            has_gpu = "nvidia.com/gpu" in yaml.safe_dump(only_container(pod)["resources"])
            assert has_gpu == (overlay == "gpu" and name == "worker"), (overlay, name)


def test_shared_memory_of_gpu_pods_is_a_limited_volume() -> None:
    pod = cluster(rendered("gpu"))["worker"]["spec"]
    mounts = {one["mountPath"]: one["name"] for one in only_container(pod)["volumeMounts"]}
    (volume,) = [one for one in pod["volumes"] if one["name"] == mounts["/dev/shm"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert nbytes(volume["emptyDir"]["sizeLimit"]) > 64 << 20
