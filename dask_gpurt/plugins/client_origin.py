"""Whether a client belongs to a task, and not to the program that the cluster works for.

Only the program's client speaks for the cluster. A task may make a client, too: by `get_client`,
by `worker_client`, by an address, in a thread or in a process of its own. Such a client finds the
flag where it is set in a worker's environment, and must not change what the program chose.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import psutil
from distributed import get_worker
from distributed.comm import get_address_host_port

from dask_gpurt.plugins.patches import client as client_patches

if TYPE_CHECKING:
    from distributed import Client, Worker


async def worker_around(client: Client) -> str | None:
    """Address of the worker that a client was made on, or None for the client of a program.

    On the client's event loop, while the client connects. A worker of another cluster does not
    count: a task may be the program of a cluster of its own.
    """
    scheduler: Any = client.scheduler
    worker = _worker_of_task()
    if worker is not None and client_patches.address_of_scheduler(worker) == scheduler.address:
        # So it is with `get_client`. The identity is long where there are many workers.
        return client_patches.address_at_scheduler(worker)
    beside = client_patches.workers_here()
    ports = await asyncio.to_thread(_ports_of_ancestors)
    if not (beside or ports):
        return None
    identity = await scheduler.identity(n_workers=-1)
    around = [] if worker is None else [client_patches.address_at_scheduler(worker)]
    # Where the program has the cluster in its own process, only the context tells a task.
    if identity["id"] not in client_patches.scheduler_ids_here():
        around += [client_patches.address_at_scheduler(one) for one in beside]
        around += descended_from(identity, ports, _addresses_here())
    return next((one for one in around if one in identity["workers"]), None)


def _worker_of_task() -> Worker | None:
    """Worker of the task that this runs for: a client takes the context of its maker along."""
    try:
        return get_worker()
    except ValueError:
        return None


def descended_from(
    identity: Mapping[str, Any], ports: Collection[int], hosts: Collection[str]
) -> list[str]:
    """Workers of a cluster that started this process, directly or not.

    None if the scheduler did so, too: then it is a program that has the cluster in its process.

    Parameters
    ----------
    identity
        Of the scheduler.
    ports
        That the processes listen on which started this one.
    hosts
        Addresses of this host.
    """

    def is_ancestor(address: str) -> bool:
        try:
            host, port = get_address_host_port(address)
        except ValueError:
            return False  # `inproc` has no port
        return port in ports and host in hosts

    if is_ancestor(identity["address"]):
        return []
    return [worker for worker in identity["workers"] if is_ancestor(worker)]


def _ports_of_ancestors() -> set[int]:
    """Ports that Python programs listen on which started this one, as far as they can be seen."""
    found: set[int] = set()
    for process in psutil.Process().parents():
        try:
            if "python" in os.path.basename(process.exe()):
                connections = _connections(process)
                found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        except (psutil.Error, OSError):
            continue
    return found


def _addresses_here() -> set[str]:
    return {one.address for of_card in psutil.net_if_addrs().values() for one in of_card}


def _connections(process: psutil.Process) -> list[Any]:
    # The name that psutil had for it before version 6.
    find = getattr(process, "net_connections", None) or process.connections
    found: list[Any] = find("tcp")
    return found
