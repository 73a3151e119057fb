"""A process at one end of UCX links, with device memory of the CUDA stand-in."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from functools import partial

import numpy as np

from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.standins import cuda_memory
from tests.transport import ucx_peer
from tests.transport.ucx_peer import content

#: Argument of a process that uses its device before UCX starts.
AT_START = "device at start"


class DeviceMemory:
    """A buffer on the device; `bytes` are for functions that act as kernels."""

    def __init__(self, nbytes: int) -> None:
        self.address, self.bytes = cuda_memory.allocate(nbytes)

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def __cuda_array_interface__(self) -> dict:
        place = (self.address, False)
        return {"data": place, "shape": (len(self),), "typestr": "|u1", "version": 3}


def filled(data: np.ndarray) -> DeviceMemory:
    memory = DeviceMemory(len(data))
    memory.bytes[:] = data
    return memory


async def exchange(engine: UcxEngine, command: dict) -> None:
    """Send or receive a message with buffers on the device, every second one on the host."""
    sizes, number, wait_s = command["sizes"], command["number"], command["wait_s"]
    expected = content(number, sizes)
    if command["do"] == "send device":
        buffers = [filled(one) if n % 2 == 0 else one for n, one in enumerate(expected)]
        await engine.send(command["peer"], number, buffers, wait_s)
        return
    kinds = [DeviceMemory, partial(np.zeros, dtype=np.uint8)]
    buffers = [kinds[place % 2](nbytes) for place, nbytes in enumerate(sizes)]
    await engine.receive(command["peer"], number, buffers, wait_s)
    for place, (found, wanted) in enumerate(zip(buffers, expected, strict=True)):
        found = found.bytes if isinstance(found, DeviceMemory) else found
        assert np.array_equal(found, wanted), f"buffer {place} of message {number}"


async def obey(engine: UcxEngine, command: dict) -> object:
    match command["do"]:
        case "use device":
            return cuda_memory.use_device()
        case "get":
            return cuda_memory.get(command["name"])
        case "put":
            return cuda_memory.put(command["name"], command["value"])
        case "send device" | "receive device":
            return await exchange(engine, command)
        case "disconnect":
            return await engine.disconnect(command["peer"])
    return await ucx_peer.obey(engine, command)


if __name__ == "__main__":
    faulthandler.enable()
    if sys.argv[2:] == [AT_START]:
        cuda_memory.use_device()
    asyncio.run(ucx_peer.main(obey))
