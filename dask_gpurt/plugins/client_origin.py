"""Tell clients made by tasks from clients of the program.

Only the program's client sets the cluster's settings. A task may create a client too: by
`get_client`, by `worker_client`, by an address, in a thread or in a process of its own. If a
worker's environment sets the flag, such a client finds it, but must not change the program's
settings.
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


async def creating_worker(client: Client) -> str | None:
    """Return the address of the worker that created a client; None for a program's client.

    Runs on the client's event loop, while the client connects. A worker of another cluster does not
    count: a task may be the program of its own cluster.
    """
    scheduler: Any = client.scheduler
    worker = _worker_of_task()
    if worker is not None and client_patches.address_of_scheduler(worker) == scheduler.address:
        # `get_client` takes this path. It avoids the identity, which is long with many workers.
        return client_patches.address_at_scheduler(worker)
    beside = client_patches.workers_here()
    try:
        ports = await asyncio.to_thread(_ports_of_ancestors)
    except RuntimeError:  # the main thread has ended, after which no other can start
        ports = _ports_of_ancestors()
    if not (beside or ports):
        return None
    identity = await scheduler.identity(n_workers=-1)
    around = [] if worker is None else [client_patches.address_at_scheduler(worker)]
    # If the program runs the cluster in its own process, only the context identifies a task.
    if identity["id"] not in client_patches.scheduler_ids_here():
        around += [client_patches.address_at_scheduler(one) for one in beside]
        around += ancestor_workers(identity, ports, _addresses_here())
    return next((one for one in around if one in identity["workers"]), None)


def _worker_of_task() -> Worker | None:
    """Return the worker whose task runs this code. A client inherits the context of its creator."""
    try:
        return get_worker()
    except ValueError:
        return None


def ancestor_workers(
    identity: Mapping[str, Any], ports: Collection[int], hosts: Collection[str]
) -> list[str]:
    """Return the workers of a cluster that are ancestors of this process.

    The list is empty if the scheduler is an ancestor too: then a program runs the cluster in its
    own process.

    Parameters
    ----------
    identity
        Identity of the scheduler.
    ports
        Ports on which ancestors of this process listen.
    hosts
        Addresses of this host.
    """

    def is_ancestor(address: str) -> bool:
        try:
            host, port = get_address_host_port(address)
        except ValueError:
            return False  # `inproc` addresses have no port
        return port in ports and host in hosts

    if is_ancestor(identity["address"]):
        return []
    return [worker for worker in identity["workers"] if is_ancestor(worker)]


def _ports_of_ancestors() -> set[int]:
    """Return the ports on which Python ancestors of this process listen, as far as visible."""
    found: set[int] = set()
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:  # the system hides processes of other users
        return found
    for process in ancestors:
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
    # psutil before version 6 has the function under its old name.
    find = getattr(process, "net_connections", None) or process.connections
    found: list[Any] = find("tcp")
    return found
