"""Start of torch.distributed on the ranks of a group, and of NCCL on their GPUs.

Torch, CuPy and NCCL are optional. All ranks agree before any of them begins to wait for the others
in a foreign library, which knows no error of another rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from distributed.comm import get_address_host

from dask_gpurt.errors import CollectiveError
from dask_gpurt.shuffle.routing import host_of

if TYPE_CHECKING:
    from dask_gpurt.plugins.collectives.groups.rank import Rank

#: Random number of this process.
_PROCESS = int.from_bytes(os.urandom(7), "big")
#: Most characters of a reason that a rank tells the others.
_MOST_CHARACTERS = 200


def places(workers: list[str], rank: int) -> tuple[int, int]:
    """Return the number of a rank on its host, and the number of ranks there."""
    hosts = [host_of(address) for address in workers]
    return Counter(hosts[:rank])[hosts[rank]], Counter(hosts)[hosts[rank]]


def torch_environment(comm: Rank, port: int) -> dict[str, str]:
    """Return the variables with which torch finds the other ranks."""
    local_rank, n_local = places(comm.workers, comm.rank)
    return {
        "MASTER_ADDR": get_address_host(comm.workers[0]),
        "MASTER_PORT": str(port),
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(n_local),
    }


def free_port() -> int:
    """Return a port of this host that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def agree(comm: Rank, why_not: str) -> None:
    """Raise on all ranks if any has a reason not to go on.

    Raises
    ------
    CollectiveError
        The same on all ranks. It names each rank with a reason.
    """
    texts = comm.all_gather(np.array([why_not], dtype=f"U{_MOST_CHARACTERS}"))[:, 0]
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(texts.tolist()) if text]
    if reasons:
        raise CollectiveError("; ".join(reasons))


def run_with_torch(
    function: Callable[..., Any], backend: str, comm: Rank, blocks: Any, *state: Any
) -> Any:
    """Call a function while torch.distributed runs. The step of `Communicator.run_torch`."""
    # Two containers may have the same number of a process, and a fork the same random one.
    processes = comm.all_gather(np.array([_PROCESS, os.getpid()])).tolist()
    if len(set(map(tuple, processes))) < comm.size:
        raise CollectiveError(
            "torch.distributed runs once in a process, and some workers share one; "
            "start workers as processes"
        )
    try:
        import torch
        import torch.distributed as dist

        why_not = "torch.distributed runs already" if dist.is_initialized() else ""
    except ImportError as error:
        why_not = f"{error}; run `pip install torch` there"
    agree(comm, why_not)
    if backend == "auto":
        local_rank, _ = places(comm.workers, comm.rank)
        has_gpu = dist.is_nccl_available() and local_rank < torch.cuda.device_count()
        backend = "nccl" if comm.allreduce(has_gpu, "all") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(places(comm.workers, comm.rank)[0])
    deadline = timedelta(seconds=comm.timeout_s)
    host, store = get_address_host(comm.workers[0]), None
    if comm.rank == 0:
        # The system chooses the port, and the store keeps it: no other program can take it.
        store = dist.TCPStore(host, 0, comm.size, True, deadline, wait_for_workers=False)
    port = int(comm.broadcast(None if store is None else np.array([store.port]))[0])
    if store is None:
        store = dist.TCPStore(host, port, comm.size, False, deadline)
    variables = torch_environment(comm, port) | _interface(comm)
    with _environment(variables):
        dist.init_process_group(
            backend, store=store, rank=comm.rank, world_size=comm.size, timeout=deadline
        )
        try:
            return function(comm, blocks, *state)
        finally:
            # Ranks that wait for this one get an error.
            dist.destroy_process_group()


def _interface(comm: Rank) -> dict[str, str]:
    """Return the variable that names the network interface of Dask's address, for gloo.

    Otherwise gloo takes the one that the host's name belongs to, which may not reach the others.
    """
    address = get_address_host(comm.workers[comm.rank])
    for name, addresses in psutil.net_if_addrs().items():
        if address in {one.address for one in addresses}:
            return {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", name)}
    return {}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_nccl(comm: Rank) -> Any:
    """Return CuPy's NCCL communicator of the group.

    Raises
    ------
    CollectiveError
        A rank lacks a library or a GPU of its own.
    """
    local_rank, _ = places(comm.workers, comm.rank)
    try:
        import cupy
        from cupy.cuda import nccl

        n_devices = cupy.cuda.runtime.getDeviceCount()
        why_not = (
            ""
            if local_rank < n_devices
            else f"it is number {local_rank} on its host, which has {n_devices} GPUs"
        )
    except Exception as error:  # CuPy raises errors of its own without a driver
        why_not = f"there is no NCCL by CuPy: {error}"
    agree(comm, why_not[:_MOST_CHARACTERS])
    with cupy.cuda.Device(local_rank):
        mine = np.array(nccl.get_unique_id(), dtype=np.int16) if comm.rank == 0 else None
        unique_id = tuple(comm.broadcast(mine).tolist())
        return nccl.NcclCommunicator(comm.size, unique_id, comm.rank)
