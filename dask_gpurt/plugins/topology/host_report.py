"""A worker's report on its machine, and the messages that it sends for a probe.

This adapter feeds `/sys`, NVML and interface addresses to `dask_gpurt.topology`, which interprets
them. It runs in a thread, because starting NVML takes a while. Missing information never raises.
NVML is asked only if it is installed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dask_gpurt.errors import ProtocolError, TransportError
from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.patches.p2p import to_serialize
from dask_gpurt.topology import nvml, probing, sysfs
from dask_gpurt.topology.machine import Machine, MachineReport
from dask_gpurt.topology.probing import ProbeTransfer

if TYPE_CHECKING:
    from distributed import Worker

_SYS = Path("/sys")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
#: Size of one part of a probe message. All parts are the same random bytes. Compression, if any,
#: works part by part, so a message does not shrink.
_PART_NBYTES = 2**20
#: With more connections of Dask's than this, idle ones are closed after a probe.
_MOST_CONNECTIONS = 32
#: Number of empty messages. The fastest one gives the latency.
_N_EMPTY = 3


class HostReporter:
    """Handlers of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def gpurt_machine(self) -> dict[str, Any]:
        """Handler: return the machine, and the GPU that CUDA shows to this process first."""
        found = await asyncio.to_thread(local_machine)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        return MachineReport(found, visible or None).to_plain()

    async def gpurt_probe(self, source: str) -> dict[str, Any]:
        """Handler: fetch a few messages from another worker.

        Returns
        -------
        dict
            `latency_s`, and `transfers`, each with its bytes and seconds; or `problem`.
        """
        request_checks.name("source", source)
        transfers: list[ProbeTransfer] = []
        try:
            async with asyncio.timeout(2 * probing.MAX_PAIR_S):
                latency_s = min([(await self._fetch(source, 0)).seconds for _ in range(_N_EMPTY)])
                while nbytes := probing.next_nbytes(transfers):
                    transfers.append(await self._fetch(source, nbytes))
        except TimeoutError:
            # A slow link that delivered at least one message is still measured.
            if not transfers:
                return {"problem": f"nothing came from {source} in {2 * probing.MAX_PAIR_S:g} s"}
        except (OSError, ValueError, RuntimeError) as error:
            # ValueError: an address of a kind that Dask does not know. RuntimeError: this worker
            # has closed its connections, as it ends.
            return {"problem": f"{source} cannot be reached: {error}"}
        finally:
            # In a large cluster, idle connections to all others would take many open files.
            if self._worker.rpc.open > _MOST_CONNECTIONS:
                self._worker.rpc.collect()
        return {"latency_s": latency_s, "transfers": transfers}

    async def _fetch(self, source: str, nbytes: int) -> ProbeTransfer:
        began = time.perf_counter()
        answer = await self._worker.rpc(source).gpurt_probe_data(nbytes=nbytes)
        seconds = time.perf_counter() - began
        if not isinstance(answer, dict):
            # The runtime was switched off there meanwhile.
            raise TransportError(f"{source} no longer answers")
        if sum(memoryview(part).nbytes for part in answer["parts"]) != nbytes:
            raise TransportError(f"{source} did not send the {nbytes} bytes that were requested")
        return ProbeTransfer(nbytes, seconds)

    async def gpurt_probe_data(self, nbytes: int) -> dict[str, Any]:
        """Handler: return `nbytes` bytes to another worker, which measures their transfer."""
        if type(nbytes) is not int or not 0 <= nbytes <= probing.LARGEST_NBYTES:
            raise ProtocolError(f"a probe of {nbytes!r} bytes")
        part = _random_part()
        full, rest = divmod(nbytes, _PART_NBYTES)
        parts = [part] * full + ([part[:rest]] if rest else [])
        return {"parts": [to_serialize(one) for one in parts]}


@lru_cache(1)
def _random_part() -> bytes:
    return os.urandom(_PART_NBYTES)


@lru_cache(1)
def local_machine() -> Machine:
    """Return the machine that this process runs on."""
    addresses = {
        name: [one.address.partition("%")[0] for one in of if one.family in _IP]
        for name, of in psutil.net_if_addrs().items()
    }
    return sysfs.read(
        _SYS, name=socket.gethostname(), boot=_system_id(), addresses=addresses, gpus=_nvml_gpus()
    )


_IP = (socket.AF_INET, socket.AF_INET6)


def _system_id() -> str:
    """Return the identity of the running system, and of the network that this process sees.

    Processes in two network namespaces of a machine, such as two containers, reach each other over
    a network alone. So these are two hosts, even if they have one name.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino}"
    except OSError:
        return ""


def _nvml_gpus() -> tuple[nvml.NvmlGpu, ...] | None:
    """Return the GPUs; None if NVML is not installed or does not work."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return nvml.gpus(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None  # installed, but there is no driver
