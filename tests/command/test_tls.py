"""`doctor`, `status` and `topology` connect to a cluster that speaks TLS only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster
from distributed.security import Security

import dask_gpurt
from tests.command.conftest import Shell

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of a certificate and its key, by the names of the settings that read them."""
    folder = tmp_path_factory.mktemp("tls")
    made = Security.temporary()
    texts = {"ca-file": made.tls_ca_file, "cert": made.tls_client_cert, "key": made.tls_client_key}
    for name, text in texts.items():
        (folder / name).write_text(str(text), encoding="utf-8")
    return {name: str(folder / name) for name in texts}


@pytest.fixture(scope="module")
def address(keys: dict[str, str]) -> Iterator[str]:
    pair = {"cert": keys["cert"], "key": keys["key"]}
    roles = {
        f"tls_{role}_{kind}": path
        for role in ("client", "scheduler", "worker")
        for kind, path in pair.items()
    }
    security = Security(tls_ca_file=keys["ca-file"], require_encryption=True, **roles)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, security=security, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        yield cluster.scheduler_address


def options(keys: dict[str, str]) -> list[str]:
    return [text for name, path in keys.items() for text in (f"--tls-{name}", path)]


@pytest.mark.parametrize("command", ["doctor", "status", "topology"])
def test_keys_are_taken_as_options(
    shell: Shell, address: str, keys: dict[str, str], command: str
) -> None:
    assert address.startswith("tls://")
    done = shell.gpurt(command, "--scheduler", address, *options(keys))
    assert done.code == 0, done.err
    assert done.out


def test_keys_are_taken_from_dasks_settings(
    shell: Shell, address: str, keys: dict[str, str]
) -> None:
    env = {
        "DASK_DISTRIBUTED__COMM__TLS__CA_FILE": keys["ca-file"],
        "DASK_DISTRIBUTED__COMM__TLS__CLIENT__CERT": keys["cert"],
        "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY": keys["key"],
    }
    done = shell.gpurt("status", "--json", "--scheduler", address, env=env)
    assert done.code == 0, done.err
    assert len(done.json["workers"]) == 2


@pytest.mark.parametrize("command", ["doctor", "status", "topology"])
def test_missing_keys_are_asked_for(shell: Shell, address: str, command: str) -> None:
    done = shell.gpurt(command, "--scheduler", address)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "give --tls-ca-file, --tls-cert and --tls-key" in done.err


def test_keys_of_another_cluster_are_refused(
    shell: Shell, address: str, keys: dict[str, str], tmp_path: Path
) -> None:
    other = Security.temporary()
    (tmp_path / "ca").write_text(str(other.tls_ca_file), encoding="utf-8")
    done = shell.gpurt(
        "status", "--scheduler", address, *options({**keys, "ca-file": str(tmp_path / "ca")})
    )
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "check the keys" in done.err


def test_missing_file_of_a_key_is_named(shell: Shell, address: str) -> None:
    done = shell.gpurt("status", "--scheduler", address, "--tls-key", "missing.pem")
    assert done.code == 2
    assert "missing.pem" in done.err


def test_file_without_a_key_is_refused(
    shell: Shell, address: str, keys: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("", encoding="utf-8")
    done = shell.gpurt(
        "status", "--scheduler", address, *options({**keys, "key": str(tmp_path / "empty")})
    )
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "the keys cannot be read" in done.err


def test_cluster_without_tls_is_recognised(shell: Shell, keys: dict[str, str]) -> None:
    with LocalCluster(n_workers=0, protocol="tcp", dashboard_address=":0") as cluster:
        address = cluster.scheduler_address.replace("tcp", "tls")
        done = shell.gpurt("status", "--scheduler", address, *options(keys))
    assert done.code == 2
    assert "Traceback" not in done.err
    assert "tls" in done.err.lower()
