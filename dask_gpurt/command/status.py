"""``dask gpurt status``: what `dask_gpurt.status` says of a running cluster, as a table or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dask.utils import format_bytes

from dask_gpurt.command.connect import ConnectError, address_of, ask, connected
from dask_gpurt.command.report import times
from dask_gpurt.metrics import MEANING


def show(scheduler: str | None, scheduler_file: Path | None, as_json: bool) -> int:
    """Print the status of a cluster.

    Returns
    -------
    int
        0, whether the runtime is on there or not.

    Raises
    ------
    ConnectError
        There is no such scheduler, or it does not answer.
    """
    address = address_of(scheduler, scheduler_file)
    if address is None:
        raise ConnectError("which cluster? give --scheduler or --scheduler-file")
    with connected(address) as client:
        found = ask(client)
    del found["versions"]
    print(json.dumps(found, indent=2) if as_json else as_text(found))
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The table for a terminal."""
    state = "on" if found["active"] else f"off: {found['reason']}"
    rows = [("scheduler", found["scheduler"]), ("dask_gpurt", state)]
    if "version" in found:
        rows += [("version", found["version"]), ("host", found["host"])]
        rows += [("strict", "yes" if found["strict"] else "no")]
    runs = found["runs"]
    rows += [("shuffles", f"{runs['gpurt']} with dask_gpurt, {runs['stock']} with stock Dask")]
    lines = _aligned(rows)
    totals = found["totals"]
    lines += ["", "over all workers"]
    lines += _aligned([(_amount(name, totals[name]), text) for name, text in MEANING.items()], "  ")
    lines += ["", f"workers: {len(found['workers'])}"]
    workers = sorted(found["workers"].items())
    lines += _aligned([_worker(address, said, found) for address, said in workers], "  ")
    if found["fallbacks"]:
        lines += ["", "left to stock Dask"]
        for one in found["fallbacks"]:
            lines.append(f"  {one['what']} ({times(one['count'])}): {one['why']}")
    return "\n".join(lines)


def _worker(address: str, report: dict[str, Any] | None, found: dict[str, Any]) -> tuple[str, str]:
    if report:
        counters = report["counters"]
        return address, (
            f"{report['version']}, {format_bytes(counters['sent_nbytes'])} sent, "
            f"{format_bytes(counters['spilled_nbytes'])} spilled"
        )
    not_ready: dict[str, str] = found["not_ready"]
    return address, not_ready.get(address, "no report" if found["active"] else "-")


def _amount(name: str, value: int) -> str:
    return format_bytes(value) if name.endswith("_nbytes") else f"{value:,}"


def _aligned(rows: list[tuple[str, str]], indent: str = "") -> list[str]:
    width = max((len(left) for left, _ in rows), default=0)
    return [f"{indent}{left:<{width}}  {right}" for left, right in rows]
