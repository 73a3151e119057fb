"""``dask gpurt topology``: print the machines of a cluster as a description, or check one.

Workers examine their machines. The scheduler combines the reports, and completes the file in use.
This module prints the result for the user to edit. Its first lines say what is from where.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dask_gpurt.command.connect import ANSWER_TIMEOUT_S, ConnectError, connected, required_address
from dask_gpurt.errors import GpurtError
from dask_gpurt.topology.description import parse
from dask_gpurt.tracing.amounts import count_text

if TYPE_CHECKING:
    from distributed import Client

_HEAD = """\
# Machines of the cluster at {address}, as {sources}.
# Correct errors, and remove links that placement should not rely on. To use this file, set in the
# program's environment: DASK_GPURT__TOPOLOGY__FILE=FILE
"""


#: Most hosts that are listed, and most hosts without a path.
MAX_LINES = 16


class TopologyError(GpurtError, ValueError):
    """There is no description to print, or the given one is invalid."""


def write(scheduler: str | None, scheduler_file: Path | None, *, probe: bool) -> int:
    """Print the description of a cluster's machines.

    Returns
    -------
    int
        0, or 1 if some workers could not be asked or measured; stderr says which.

    Raises
    ------
    TopologyError
        There is no such scheduler, or the runtime is off there.
    """
    try:
        address = required_address(scheduler, scheduler_file)
        with connected(address) as client:
            found = _ask(client, probe)
    except ConnectError as error:
        raise TopologyError(str(error)) from error
    if not found["workers"]:
        raise TopologyError(f"no worker of {address} has reported; try again later")
    sources = f"{found['workers']} of its workers report them"
    if found["file"] is not None:
        sources = f"{found['file']} and {found['workers']} of its workers describe them"
    print(_HEAD.format(address=address, sources=sources) + found["text"], end="")
    for about, problem in found["problems"].items():
        print(f"dask gpurt topology: {about}: {problem}", file=sys.stderr)
    return 1 if found["problems"] else 0


def _ask(client: Client, probe: bool) -> dict[str, Any]:
    from dask_gpurt.plugins import activation

    try:
        found: dict[str, Any] = client.sync(  # type: ignore[no-untyped-call]
            activation.machines, client, probe, callback_timeout=ANSWER_TIMEOUT_S
        )
    except GpurtError as error:
        raise TopologyError(
            f"{error}; set DASK_GPURT__ENABLED=true in the environment of the program that connects"
        ) from error
    except (OSError, TimeoutError) as error:
        raise TopologyError(f"the cluster does not answer: {error!r}") from error
    return found


def check_file(path: Path) -> int:
    """Print a summary of a description.

    Raises
    ------
    TopologyError
        The description is invalid. The message says why, and where.
    """
    try:
        found = parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise TopologyError(f"cannot read {path}: {why}") from error
    except ValueError as error:
        raise TopologyError(str(error)) from error
    inner = Counter(
        name for link in found.links for name in {end.partition("/")[0] for end in link.ends}
    )
    n_links = len(found.links)
    lines = [
        f"{host.name}: {len(host.numa)} NUMA nodes, {len(host.devices)} devices,"
        f" {len(host.nics)} network cards, {inner[host.name]} links"
        for host in found.hosts
    ]
    nodes = [host.node(host.numa[0].name) for host in found.hosts]
    apart = [
        f"no path from {nodes[0]} to {other}: the bandwidth between them is learnt"
        for other in nodes[1:]
        if found.path(nodes[0], other) is None
    ]
    hosts, links = count_text(len(found.hosts), "host"), count_text(n_links, "link")
    print(f"{path} can be used: {hosts}, {links}")
    for some in (lines, apart):
        for line in some[:MAX_LINES]:
            print(line)
        if len(some) > MAX_LINES:
            print(f"... and {len(some) - MAX_LINES} more")
    return 0
