"""``dask gpurt memory``: what takes the memory of each worker's process, and what would free it.

`plugins.worker.memory_parts` measures on the workers. Of a worker that cannot run it, as without
this package, Dask's own figures are shown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dask.utils import format_bytes

from dask_gpurt.command.connect import (
    ANSWER_TIMEOUT_S,
    ConnectError,
    ask_workers,
    connected,
    no_answer,
    required_address,
)
from dask_gpurt.command.json_text import to_json
from dask_gpurt.command.layout import aligned, terminal_width, wrapped
from dask_gpurt.tracing.amounts import name_text

#: Parts below this share of the resident bytes get no advice.
LEAST_SHARE = 0.05


def show(
    scheduler: str | None, scheduler_file: Path | None, worker: str | None, as_json: bool
) -> int:
    """Print what takes the memory of workers.

    Parameters
    ----------
    worker
        Address or name of one worker; None for all.

    Raises
    ------
    ConnectError
        There is no such scheduler or worker, or the scheduler does not answer.
    """
    address = required_address(scheduler, scheduler_file)
    with connected(address) as client:
        try:
            found = client.sync(  # type: ignore[no-untyped-call]
                _measured, client, worker, callback_timeout=2 * ANSWER_TIMEOUT_S
            )
        except ConnectError:
            raise
        except Exception as error:  # the scheduler has gone, or is busy
            raise no_answer(address, error) from error
    print(to_json(found) if as_json else as_text(found, terminal_width()))
    return 0


async def _measured(client: Any, wanted: str | None) -> dict[str, Any]:
    """Return the figures of each worker by address."""
    from distributed.protocol.pickle import dumps

    from dask_gpurt.plugins import bootstrap
    from dask_gpurt.plugins.worker.memory_parts import memory_parts

    known = (await client.scheduler.identity(n_workers=-1))["workers"]
    chosen = {
        address: about
        for address, about in known.items()
        if wanted is None or wanted in (address, str(about["name"]))
    }
    if wanted is not None and not chosen:
        names = ", ".join(sorted(known))
        raise ConnectError(f"there is no worker {wanted!r}", f"there are: {names or 'none'}")
    message = {
        "op": "run",
        "function": dumps(memory_parts),
        "args": dumps(()),
        "kwargs": dumps({}),
        "wait": True,
    }

    async def answer(address: str, message: dict[str, Any]) -> Any:
        found = await ask_workers(client, message, [address], ANSWER_TIMEOUT_S)
        return (found or {}).get(address)

    async def one(address: str, about: Mapping[str, Any]) -> dict[str, Any]:
        # A function that a worker cannot load would be an error in its log.
        said = await answer(address, {"op": "versions", "packages": [bootstrap.PACKAGE]})
        if said is None:
            return _of_dask(about, "it does not answer")
        differs = bootstrap.difference(said["packages"], bootstrap.installed())
        if differs is not None:
            return _of_dask(about, differs)
        measured = await answer(address, message)
        if measured is None or measured["status"] != "OK":
            return _of_dask(about, "it could not be asked; its log says why")
        return {"name": str(about["name"]), "problem": None, **measured["result"]}

    results = await asyncio.gather(*(one(*pair) for pair in chosen.items()))
    return dict(zip(chosen, results, strict=True))


def _of_dask(about: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """Return what the scheduler knows of a worker's memory from heartbeats."""
    metrics = about["metrics"]
    resident, managed = metrics["memory"], metrics["managed_bytes"]
    managed = min(resident, max(0, managed - metrics["spilled_bytes"]["memory"]))
    return {
        "name": str(about["name"]),
        "problem": problem,
        "active": None,
        "resident_nbytes": resident,
        "limit_nbytes": about["memory_limit"] or None,
        "parts": {"outputs": managed, "rest": resident - managed},
        "levels": [],
        "prefixes": [],
        "on_disk_nbytes": metrics["spilled_bytes"]["disk"],
    }


def as_text(found: Mapping[str, Mapping[str, Any]], width: int | None = None) -> str:
    """Return the parts of each worker's memory, and what would free the large ones."""
    from distributed.comm import get_address_host as get_host

    if not found:
        return "there are no workers"
    lines: list[str] = []
    advised: dict[str, None] = {}
    process_of = {address: (get_host(address), one.get("pid")) for address, one in found.items()}
    sharing = Counter(process for process in process_of.values() if process[1] is not None)
    for address, one in sorted(found.items()):
        lines += _worker(address, one, width)
        if (n := sharing[process_of[address]]) > 1:
            text = f"{n} workers share its process: the rest has the outputs of the others"
            lines += wrapped(text, width, "  ")
        lines.append("")
        least = LEAST_SHARE * one["resident_nbytes"]
        advised |= dict.fromkeys(name for name, n in one["parts"].items() if abs(n) >= least)
    return "\n".join([*lines, "what would free it", *_advice(advised, width)])


def _advice(names: Mapping[str, None], width: int | None) -> list[str]:
    from dask_gpurt.plugins.worker.memory_parts import PARTS

    rows = [(meaning, advice) for name, (meaning, advice) in PARTS.items() if name in names]
    return aligned(rows, "  ", width)


def _worker(address: str, one: Mapping[str, Any], width: int | None) -> list[str]:
    from dask_gpurt.plugins.worker.memory_parts import PARTS

    limit = f" of {format_bytes(one['limit_nbytes'])}" if one["limit_nbytes"] else ", no limit"
    title = f"{address}: {format_bytes(one['resident_nbytes'])}{limit}"
    if one["active"] is not None:  # else nobody knows
        title += f"; dask_gpurt is {'on' if one['active'] else 'off here'}"
    lines = wrapped(title, width)
    if one["problem"]:
        lines += wrapped(f"by Dask's own figures: {one['problem']}", width, "  ")
    rows = [
        (_size(one["parts"][name]), meaning + _tiers(one["levels"] if name == "outputs" else ()))
        for name, (meaning, _) in PARTS.items()
        if one["parts"].get(name)
    ]
    lines += aligned(rows, "  ", width)
    if one["on_disk_nbytes"]:
        lines.append(f"  and on disk: {format_bytes(one['on_disk_nbytes'])}")
    if one["prefixes"]:
        said = ", ".join(
            f"{name_text(name)} {format_bytes(n)} in {k:,}" for name, n, k in one["prefixes"]
        )
        lines += wrapped(f"largest outputs: {said}", width, "  ", "    ")
    return lines


def _size(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else ''}{format_bytes(abs(nbytes))}"


def _tiers(levels: Sequence[Mapping[str, Any]]) -> str:
    """Return the bytes of outputs by tier, where there are several in memory."""
    held = [one for one in levels if one["in_memory"] and one["nbytes"]]
    if len(held) < 2:
        return ""
    return ": " + ", ".join(f"{format_bytes(one['nbytes'])} {one['name']}" for one in held)
