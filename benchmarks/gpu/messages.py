"""Section that sends device memory between two processes on one GPU, over our UCX links.

The yardstick is a copy within the device by one process. Both count each byte once. Buffers are
reused, as those of the runtime's pools, or new for each message, as those of task outputs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import Any

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s
from dask_gpurt.devices.cuda.driver import why_no_cuda

SIZES = (1 << 20, 16 << 20, 64 << 20, 256 << 20)
ROUND_NBYTES = 4 << 30
MOST_MESSAGES = 512
IN_FLIGHT = 4
REPEATS = 5
DEADLINE_S = 60.0


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    if (reason := why_no_cuda()) is not None:
        return reason
    try:
        import ucxx  # noqa: F401
    except ImportError as error:
        return f"ucxx cannot be imported: {error}"
    return ""


def copy_gb_per_s(nbytes: int = 1 << 30) -> float:
    """Return the rate of copies within the device."""
    import cupy

    source, target = (cupy.ones(nbytes, cupy.uint8) for _ in range(2))

    def copy() -> None:
        for _ in range(8):
            target.data.copy_from_device_async(source.data, nbytes, cupy.cuda.Stream.null)
        cupy.cuda.Stream.null.synchronize()

    return 8 * nbytes / medians_s({"copy": copy}, REPEATS)["copy"] / 1e9


def run(report: Report) -> None:
    """Measure each size, with reused buffers and with new ones."""
    device_rate = copy_gb_per_s()
    report(Row("copy within the device", device_rate, "GB/s"))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive, args=(there,))
    process.start()
    try:
        asyncio.run(_send(here, device_rate, report))
    finally:
        here.close()
        process.join(DEADLINE_S)
        process.kill()


def n_messages(nbytes: int) -> int:
    """Return the number of messages of a round."""
    return min(MOST_MESSAGES, ROUND_NBYTES // nbytes)


class End:
    """Buffers of one end, and the messages of a round."""

    def __init__(self, engine: Any, peer: str, is_sender: bool) -> None:
        self._move = engine.send if is_sender else engine.receive
        self._is_sender = is_sender
        self._peer = peer
        self._number = 0
        self._kept: dict[tuple[int, int], Any] = {}

    def buffer(self, nbytes: int, slot: int, is_new: bool) -> Any:
        """Return device memory for a message."""
        import cupy

        from dask_gpurt.frames.device.cupy_ import CupyMemory

        if is_new:
            return CupyMemory(cupy.empty(nbytes, cupy.uint8))
        key = nbytes, slot
        if key not in self._kept:
            content = slot + 1 if self._is_sender else 0
            self._kept[key] = CupyMemory(cupy.full(nbytes, content, cupy.uint8))
            cupy.cuda.Stream.null.synchronize()
        return self._kept[key]

    async def round(self, nbytes: int, is_new: bool) -> None:
        """Send or receive the messages of a round, some at a time."""
        first, total = self._number, n_messages(nbytes)
        self._number += total

        async def lane(slot: int) -> None:
            for number in range(first + slot, first + total, IN_FLIGHT):
                buffer = self.buffer(nbytes, slot, is_new)
                await self._move(self._peer, number, [buffer], DEADLINE_S)

        await asyncio.gather(*(lane(slot) for slot in range(IN_FLIGHT)))

    def has_arrived(self, nbytes: int) -> bool:
        """Return whether the reused buffers hold the sender's bytes."""
        slots = range(min(IN_FLIGHT, n_messages(nbytes)))
        return all(bool((self._kept[nbytes, slot].array == slot + 1).all()) for slot in slots)


def _receive(pipe: Any) -> None:
    asyncio.run(_serve(pipe))


async def _serve(pipe: Any) -> None:
    import cupy

    from dask_gpurt.transport.ucx import UcxEngine

    cupy.zeros(1)  # a context, as a worker with values on the device has one
    engine = await UcxEngine.start("127.0.0.1")
    peer = await asyncio.to_thread(pipe.recv)
    pipe.send(await engine.invite(peer, DEADLINE_S))
    end = End(engine, peer, is_sender=False)
    try:
        while True:
            nbytes, is_new = await asyncio.to_thread(pipe.recv)
            pipe.send("ready")
            await end.round(nbytes, is_new)
            pipe.send("done")
            pipe.send(is_new or end.has_arrived(nbytes))
    except EOFError:
        await engine.close(DEADLINE_S)


async def _send(pipe: Any, device_rate: float, report: Report) -> None:
    from dask_gpurt.transport.ucx import UcxEngine

    engine = await UcxEngine.start("127.0.0.1")
    pipe.send(engine.token)
    peer = await engine.connect(await asyncio.to_thread(pipe.recv), DEADLINE_S)
    end = End(engine, peer, is_sender=True)
    for nbytes in SIZES:
        for is_new in (False, True):
            took_s, are_right = [], True
            for number in range(REPEATS + 1):
                pipe.send((nbytes, is_new))
                await asyncio.to_thread(pipe.recv)
                began = time.perf_counter()
                await end.round(nbytes, is_new)
                await asyncio.to_thread(pipe.recv)
                if number:  # the first round is a rehearsal
                    took_s.append(time.perf_counter() - began)
                are_right &= await asyncio.to_thread(pipe.recv)
            median_s = sorted(took_s)[len(took_s) // 2]
            rate = n_messages(nbytes) * nbytes / median_s / 1e9
            report(
                Row(
                    f"messages of {nbytes >> 20} MiB, {'new' if is_new else 'reused'} buffers",
                    rate,
                    "GB/s",
                    rate / device_rate,
                    "this / copy within the device",
                    ">= 0.8",
                    details={"are_right": are_right, "took_s": took_s},
                )
            )
    await engine.close(DEADLINE_S)
