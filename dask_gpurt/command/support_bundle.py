"""``dask gpurt support-bundle``: collect what a question about a cluster needs, in one zip file.

The file has findings, settings, and, with a scheduler, its status, machines and logs. Passwords,
tokens and keys are removed (`redacted`, `redacted_settings`). A part that cannot be had is named in
the file, and the other parts are still written.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config

from dask_gpurt.command.checks.local import local_findings
from dask_gpurt.command.connect import (
    ANSWER_TIMEOUT_S,
    ConnectError,
    address_of,
    ask,
    ask_workers,
    connected,
    silent,
)
from dask_gpurt.command.json_text import to_json

if TYPE_CHECKING:
    from distributed import Client

#: Most log lines of a process, and most workers whose logs are fetched.
LOG_LINES = 2_000
LOGGED_WORKERS = 64
#: Time in which workers have to send their logs.
_LOGS_TIMEOUT_S = 10.0

_REMOVED = "[removed]"
#: Words in the names of secret settings.
_SECRETS = (
    "password|passwd|pwd|secret|token|credential|auth|apikey|api[-_]key|access[-_]?key"
    "|account[-_]?key|signature|private|cookie"
)
_SECRET_NAME = re.compile(rf"{_SECRETS}|(^|[-_.])key$", re.IGNORECASE)
#: Words before a secret in a header.
_SCHEMES = "basic|bearer|digest|token"
_SECRET_TEXTS = (
    # name=value, name: value, "name": "value"; in the text of an error, quotes are escaped
    re.compile(
        rf"""(?i)([\w-]*(?:{_SECRETS})[\w-]*\\*["']?\s*[=:]\s*(?:(?:{_SCHEMES})\s+)?)"""
        r"""(?:\\*"[^"]*"|\\*'[^']*'|[^\s"',;&]+)"""
    ),
    # The key of a dashboard, and the signature of an address in Azure.
    re.compile(r"(?i)([?&](?:key|sig)=)[^\s&\"']+"),
    # scheme://user:password@host; a password may contain `@`
    re.compile(r"""(\w+://)[^\s:@]*:[^\s"'\\]+(?=@)"""),
    # headers of requests
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]+"),
)
_PEM = re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|\Z)", re.DOTALL)

_README = """\
Made by `dask gpurt support-bundle`.

findings.json   versions and settings of the machine that wrote this file
settings.json   Dask's settings there
cluster/        status, machines and logs of the scheduler at {address}
missing.txt     parts that could not be had, and why

Passwords, tokens and keys were removed where they could be recognised. Look through the files
before you send them to anybody: logs have the names of hosts, tasks and files.
"""


def redacted(text: str) -> str:
    """Return a text without the secrets that can be recognised in it."""
    text = _PEM.sub(_REMOVED, text)
    for pattern in _SECRET_TEXTS:
        text = pattern.sub(rf"\g<1>{_REMOVED}", text)
    return text


def redacted_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without values of secret names, or secrets in other values."""
    return {str(name): _redacted_value(str(name), value) for name, value in settings.items()}


def _redacted_value(name: str, value: Any) -> Any:
    if _SECRET_NAME.search(name):
        return _removed(value)
    if isinstance(value, Mapping):
        return redacted_settings(value)
    if isinstance(value, list | tuple):
        return [_redacted_value("", one) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else redacted(str(value))


def _removed(value: Any) -> Any:
    """Return what may be shown of a secret: the names in a section, and whether it is set."""
    if isinstance(value, Mapping):
        return {str(name): _removed(one) for name, one in value.items()}
    return value if value in (None, "", False, True) else _REMOVED


def write(scheduler: str | None, scheduler_file: Path | None, out: Path) -> str:
    """Write the zip file, and return a line about it.

    Raises
    ------
    ConnectError
        The options name two schedulers, or a file without one.
    OSError
        The file cannot be written.
    """
    address = address_of(scheduler, scheduler_file)
    missing: list[str] = []
    # Only for this user: even without secrets, logs are private.
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(fd, 0o600)  # a file that was there keeps its mode
    with os.fdopen(fd, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("README.txt", _README.format(address=address or "(none was named)"))
        with silent("dask_gpurt"):
            findings = [asdict(finding) for finding in local_findings()]
        bundle.writestr("findings.json", redacted(to_json(findings)))
        bundle.writestr("settings.json", to_json(redacted_settings(dask.config.config)))
        if address is not None:
            try:
                with connected(address) as client:
                    for name, text in _cluster_parts(client, missing):
                        bundle.writestr(f"cluster/{name}", redacted(text))
            except ConnectError as error:
                missing.append(str(error))
        bundle.writestr("missing.txt", "".join(f"{line}\n" for line in missing))
    about = "; missing.txt in it names parts that could not be had" if missing else ""
    return f"wrote {out}{about}"


def _cluster_parts(client: Client, missing: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file about a cluster; add to `missing` what fails."""
    workers: list[str] = []
    try:
        status = ask(client, versions=True)
        reported = status["workers"].keys() - set(status.get("silent") or ())
        workers = sorted(reported)[:LOGGED_WORKERS]
        if len(workers) < len(status["workers"]):
            missing.append(f"logs of {len(status['workers']) - len(workers)} workers")
        yield "status.json", to_json(status)
    except ConnectError as error:
        missing.append(f"status: {error}")
    for name, part in (("topology.yaml", _machines), ("logs", _logs)):
        try:
            found = client.sync(  # type: ignore[no-untyped-call]
                part, client, workers, callback_timeout=ANSWER_TIMEOUT_S
            )
        except Exception as error:  # whatever fails, the other parts help
            missing.append(f"{name}: {error}")
        else:
            yield from found


async def _machines(client: Client, workers: list[str]) -> list[tuple[str, str]]:
    from dask_gpurt.plugins import activation

    found = await activation.machines(client, False)
    return [("topology.yaml", found["text"])]


async def _logs(client: Client, workers: list[str]) -> list[tuple[str, str]]:
    scheduler: Any = client.scheduler
    found = {"scheduler": await scheduler.get_logs(n=LOG_LINES)}
    message = {"op": "get_logs", "n": LOG_LINES}
    of_workers = await ask_workers(client, message, workers, _LOGS_TIMEOUT_S)
    if of_workers is None:
        raise TimeoutError(f"workers sent no logs in {_LOGS_TIMEOUT_S:g} s")
    found.update(of_workers)
    return [
        (f"logs/{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.txt", _lines(logs))
        for name, logs in found.items()
    ]


def _lines(logs: list[tuple[str, str]]) -> str:
    """Return log lines in the order of time; Dask has the newest first."""
    return "".join(f"{line}\n" for _, line in reversed(logs))
