"""`dask gpurt support-bundle` collects what a question needs, without secrets."""

from __future__ import annotations

import json
import logging
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.command.observe import scheduler_address
from dask_gpurt.command.support_bundle import redacted, redacted_settings
from tests.command.conftest import Shell
from tests.conftest import Sides

SECRET = "hunter2x"


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"DB_PASSWORD: {SECRET}",
        f'{{"api_key": "{SECRET}", "n": 1}}',
        f"aws_secret_access_key = '{SECRET}'",
        f"https://me:{SECRET}@example.com/path",
        f"Authorization: Bearer {SECRET}",
        f"sent header bearer {SECRET}",
        f"Authorization: Basic {SECRET}",
        f"Authorization: token {SECRET}",
        f"redis://:{SECRET}@10.0.0.1:6379",
        f"postgres://me:p/{SECRET}@host/db",
        f"s3://me:p@{SECRET}@host/bucket",
        f"AccountKey={SECRET};x",
        f"password='two words {SECRET}'",
        f"{{'account_key': '{SECRET}'}}",
        f"https://me.blob.core.windows.net/data?sp=r&sig={SECRET}",
        f"https://bucket.s3.amazonaws.com/key?X-Amz-Signature={SECRET}&X-Amz-Expires=60",
        *(
            repr(repr(f"no access with {{'{name}': '{SECRET}'}}"))
            for name in ("secret", "sas_token")
        ),
        f"http://10.0.0.1:8787/status?key={SECRET}",
        f"GET /?token={SECRET}&page=2",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\ncut off",
    ],
)
def test_secrets_are_removed_from_text(text: str) -> None:
    assert SECRET not in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "Shuffle 83f1 initialized by task ('shuffle-transfer-83f1', 2)",
        "distributed.worker - INFO - Start worker at: tcp://10.0.0.1:40001",
        "key: ('sum', 3)",
    ],
)
def test_ordinary_lines_stay(text: str) -> None:
    assert redacted(text) == text


@given(st.dictionaries(st.text("ab-_."), st.integers() | st.text("xyz ") | st.none()))
def test_ordinary_settings_stay(settings: dict[str, Any]) -> None:
    assert redacted_settings(settings) == settings


def test_secret_settings_are_removed_at_any_depth() -> None:
    settings = {
        "comm": {"tls": {"client": {"key": f"/home/me/{SECRET}.pem", "cert": "cert.pem"}}},
        "jobqueue": {"env": [f"TOKEN={SECRET}"], "password": SECRET, "auth": None},
        "credentials": {"value": SECRET, "of": [{"me": SECRET}], "expires": None},
        "enabled": True,
    }
    found = redacted_settings(settings)
    assert SECRET not in json.dumps(found)
    assert found["comm"]["tls"]["client"]["cert"] == "cert.pem"
    assert found["jobqueue"]["auth"] is None
    assert found["credentials"] == {"value": "[removed]", "of": "[removed]", "expires": None}
    assert found["enabled"] is True


def opened(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as bundle:
        return {name: bundle.read(name).decode() for name in bundle.namelist()}


def _log_a_secret() -> None:
    logging.getLogger("distributed.worker").warning("connected with password=%s", SECRET)


@pytest.mark.cluster
def test_a_bundle_describes_a_cluster(shell: Shell, sides: Sides) -> None:
    # A worker that another test killed may be about to return.
    sides.enabled.wait_for_workers(3, timeout=60)
    sides.enabled.run(_log_a_secret)
    address = scheduler_address(sides.enabled)
    done = shell.gpurt("support-bundle", "--scheduler", address, "--out", "found.zip")
    assert (done.code, done.out) == (0, "wrote found.zip\n"), done.err
    path = shell.directory / "found.zip"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    files = opened(path)
    assert files["missing.txt"] == ""
    assert address in files["README.txt"]
    assert {one["what"] for one in json.loads(files["findings.json"])} >= {"python", "dask"}
    assert "distributed" in json.loads(files["settings.json"])
    status = json.loads(files["cluster/status.json"])
    assert len(status["workers"]) == 3
    assert status["versions"]["scheduler"]
    assert "hosts:" in files["cluster/topology.yaml"]
    logs = {name: text for name, text in files.items() if name.startswith("cluster/logs/")}
    assert len(logs) == 4
    assert sum("connected with password=[removed]" in text for text in logs.values()) == 3
    assert not any(SECRET in text for text in files.values())


def test_a_bundle_without_a_cluster_describes_this_machine(shell: Shell) -> None:
    done = shell.gpurt("support-bundle")
    assert (done.code, done.out) == (0, "wrote gpurt-support.zip\n"), done.err
    files = opened(shell.directory / "gpurt-support.zip")
    assert files.keys() == {"README.txt", "findings.json", "settings.json", "missing.txt"}


def test_a_cluster_that_does_not_answer_is_named_in_the_bundle(shell: Shell) -> None:
    done = shell.gpurt("support-bundle", "--scheduler", "tcp://127.0.0.1:1")
    assert done.code == 0, done.err
    assert "missing.txt in it names parts that could not be had" in done.out
    files = opened(shell.directory / "gpurt-support.zip")
    assert "nothing listens on that port" in files["missing.txt"]


def test_a_file_that_cannot_be_written_is_named(shell: Shell) -> None:
    done = shell.gpurt("support-bundle", "--out", "no/such/folder.zip")
    assert done.code == 2
    assert "no/such/folder.zip" in done.err
    assert "Traceback" not in done.err
