"""Section that sends device memory between two processes on one GPU, over our UCX links.

The yardstick is a copy within the device by one process. Both count each byte once. Each message
has new buffers, as shards do. Some messages are in flight at a time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from typing import Any

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import copy_gb_per_s, why_skipped

#: Bytes of a buffer, buffers of a message, and messages in flight.
SHAPES = (
    (1 << 20, 1, 2),
    (16 << 20, 1, 2),
    (64 << 20, 1, 2),
    (64 << 20, 4, 2),
    (64 << 20, 4, 4),
    (256 << 20, 1, 2),
    (256 << 20, 1, 8),
)
ROUND_NBYTES = 8 << 30
MOST_MESSAGES = 512
REPEATS = 5
DEADLINE_S = 60.0


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_skipped("ucxx")


def run(report: Report) -> None:
    """Measure each shape of messages."""
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


class End:
    """One end of the messages, with their buffers."""

    def __init__(self, engine: Any, peer: str, is_sender: bool) -> None:
        self._move = engine.send if is_sender else engine.receive
        self._is_sender = is_sender
        self._peer = peer
        self._number = 0

    async def round(self, nbytes: int, n_buffers: int, in_flight: int) -> int:
        """Send or receive the messages of a round; return their number."""
        import cupy

        from dask_gpurt.frames.device.cupy_ import CupyMemory

        first, total = self._number, min(MOST_MESSAGES, ROUND_NBYTES // (nbytes * n_buffers))
        self._number += total

        async def lane(slot: int) -> None:
            for number in range(first + slot, first + total, in_flight):
                buffers = [CupyMemory(cupy.empty(nbytes, cupy.uint8)) for _ in range(n_buffers)]
                await self._move(self._peer, number, buffers, DEADLINE_S)

        await asyncio.gather(*(lane(slot) for slot in range(in_flight)))
        return total

    async def check(self, nbytes: int, n_buffers: int) -> bool:
        """Move one message of known bytes; return whether it arrived."""
        import cupy

        from dask_gpurt.frames.device.cupy_ import CupyMemory

        number, self._number = self._number, self._number + 1
        known = [
            cupy.arange(nbytes, dtype=cupy.uint32).astype(cupy.uint8) for _ in range(n_buffers)
        ]
        buffers = [one if self._is_sender else cupy.zeros_like(one) for one in known]
        cupy.cuda.Stream.null.synchronize()
        await self._move(self._peer, number, list(map(CupyMemory, buffers)), DEADLINE_S)
        return all(bool((one == want).all()) for one, want in zip(buffers, known, strict=True))


def _receive(pipe: Any) -> None:
    asyncio.run(_serve(pipe))


async def _serve(pipe: Any) -> None:
    import cupy

    from dask_gpurt.transport.ucx.engine import UcxEngine

    cupy.zeros(1)  # a context, as a worker with values on the device has one
    engine = await UcxEngine.start("127.0.0.1")
    peer = await asyncio.to_thread(pipe.recv)
    pipe.send(await engine.invite(peer, DEADLINE_S))
    end = End(engine, peer, is_sender=False)
    try:
        while True:
            nbytes, n_buffers, in_flight = await asyncio.to_thread(pipe.recv)
            pipe.send("ready")
            await end.round(nbytes, n_buffers, in_flight)
            pipe.send("done")
            pipe.send(await end.check(nbytes, n_buffers))
    except EOFError:
        await engine.close(DEADLINE_S)


async def _send(pipe: Any, device_rate: float, report: Report) -> None:
    from dask_gpurt.transport.ucx.engine import UcxEngine

    engine = await UcxEngine.start("127.0.0.1")
    pipe.send(engine.token)
    peer = await engine.connect(await asyncio.to_thread(pipe.recv), DEADLINE_S)
    end = End(engine, peer, is_sender=True)
    for nbytes, n_buffers, in_flight in SHAPES:
        took_s, are_right = [], True
        for number in range(REPEATS + 1):
            pipe.send((nbytes, n_buffers, in_flight))
            await asyncio.to_thread(pipe.recv)
            began = time.perf_counter()
            total = await end.round(nbytes, n_buffers, in_flight)
            await asyncio.to_thread(pipe.recv)
            if number:  # the first round is a rehearsal
                took_s.append(time.perf_counter() - began)
            await end.check(nbytes, n_buffers)
            are_right &= await asyncio.to_thread(pipe.recv)
        median_s = statistics.median(took_s)
        rate = total * n_buffers * nbytes / median_s / 1e9
        report(
            Row(
                f"messages of {n_buffers} x {nbytes >> 20} MiB, {in_flight} in flight",
                rate,
                "GB/s",
                rate / device_rate,
                "this / copy within the device",
                ">= 0.8",
                details={"are_right": are_right, "took_s": took_s, "messages": total},
            )
        )
    await engine.close(DEADLINE_S)
