"""Bytes a second of messages between two processes, over UCX and over distributed's TCP comm.

Both ways end as a message of a shuffle does, with the receiver's answer that it has everything.
Over UCX, a control message with the lengths goes over a TCP comm. UCX carries the payload into
reused buffers, like those of a shuffle's pool. Over the TCP comm, the payload is in the message,
wrapped in `to_serialize`. A payload consists of shards of 1 MiB.

Each way has a first round that does not count. Then the ways take turns in alternating order. Two
messages are in flight at a time, as between two workers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

import numpy as np
from distributed.comm import connect, listen
from distributed.protocol import to_serialize

from benchmarks.harness import arguments, machine
from dask_gpurt.transport.ucx.engine import UcxEngine

ENGINES: dict[str, dict[str, str]] = {"ucx": {}}
STOCK = "tcp comm"
SHARD_NBYTES = 1 << 20
IN_FLIGHT = 2
DEADLINE_S = 60.0


async def start_engines(tls: list[str]) -> dict[str, UcxEngine]:
    return {name: await UcxEngine.start("127.0.0.1", ENGINES[name]) for name in tls}


class Receiver:
    """The receiving process: it answers each message that has arrived completely."""

    def __init__(self) -> None:
        self.engines: dict[str, UcxEngine] = {}
        self.spare: dict[tuple[int, ...], list[list[np.ndarray]]] = {}

    async def handle(self, comm: Any) -> None:
        while True:
            message = await comm.read()
            if message["way"] == "end":
                await comm.write("ok")
                return
            if message["way"] != STOCK:
                lengths = tuple(message["lengths"])
                spare = self.spare.setdefault(lengths, [])
                buffers = spare.pop() if spare else [np.zeros(n, np.uint8) for n in lengths]
                await self.engines[message["way"]].receive(
                    message["token"], message["number"], buffers, DEADLINE_S
                )
                spare.append(buffers)
            else:
                assert sum(len(shard) for shard in message["payload"]) == message["nbytes"]
            del message
            await comm.write("ok")

    async def serve(self, pipe: Any) -> None:
        self.engines = await start_engines(list(ENGINES))
        async with await listen("tcp://127.0.0.1:0", self.handle, deserialize=True) as listener:
            tokens = await asyncio.to_thread(pipe.recv)
            descriptors = {
                name: await engine.invite(tokens[name], DEADLINE_S)
                for name, engine in self.engines.items()
            }
            pipe.send((listener.contact_address, descriptors))
            await asyncio.to_thread(pipe.recv)
        for engine in self.engines.values():
            await engine.close(DEADLINE_S)


def other_process(pipe: Any) -> None:
    asyncio.run(Receiver().serve(pipe))


class Sender:
    def __init__(self, engines: dict[str, UcxEngine], comms: list[Any]) -> None:
        self.engines = engines
        self.comms = comms
        self.tokens: dict[str, str] = {}
        self._numbers = itertools.count()

    async def message(self, way: str, comm: Any, shards: list[np.ndarray]) -> None:
        if way == STOCK:
            nbytes = sum(len(shard) for shard in shards)
            payload = [to_serialize(shard.data) for shard in shards]
            await comm.write({"way": way, "nbytes": nbytes, "payload": payload})
        else:
            engine, number = self.engines[way], next(self._numbers)
            lengths = [len(shard) for shard in shards]
            sending = asyncio.create_task(engine.send(self.tokens[way], number, shards, DEADLINE_S))
            await comm.write(
                {"way": way, "token": engine.token, "number": number, "lengths": lengths}
            )
            await sending
        assert await comm.read() == "ok"

    async def round(self, way: str, n_messages: int, shards: list[np.ndarray]) -> float:
        """Send `n_messages` messages; return bytes a second."""

        async def lane(comm: Any) -> None:
            for _ in range(n_messages // len(self.comms)):
                await self.message(way, comm, shards)

        began = time.perf_counter()
        await asyncio.gather(*(lane(comm) for comm in self.comms))
        elapsed = time.perf_counter() - began
        return n_messages * sum(len(shard) for shard in shards) / elapsed


async def measure(pipe: Any, repeats: int, total_nbytes: int) -> dict[str, Any]:
    engines = await start_engines(list(ENGINES))
    pipe.send({name: engine.token for name, engine in engines.items()})
    address, descriptors = await asyncio.to_thread(pipe.recv)
    comms = [await connect(address, deserialize=True) for _ in range(IN_FLIGHT)]
    sender = Sender(engines, comms)
    for name, engine in engines.items():
        sender.tokens[name] = await engine.connect(descriptors[name], DEADLINE_S)
    rows: dict[str, Any] = {}
    for mebibytes in (1, 16, 64):
        shards = [
            np.random.default_rng(n).integers(0, 256, SHARD_NBYTES, np.uint8)
            for n in range(mebibytes)
        ]
        n_messages = max(2 * IN_FLIGHT, total_nbytes // (mebibytes << 20)) // IN_FLIGHT * IN_FLIGHT
        rates: dict[str, list[float]] = {STOCK: [], **{name: [] for name in engines}}
        ways = list(rates)
        for way in ways:
            await sender.round(way, n_messages, shards)
        for number in range(repeats):
            for way in ways:
                rates[way].append(await sender.round(way, n_messages, shards))
            ways.reverse()
            print(f"  {mebibytes} MiB: {number + 1}/{repeats}", file=sys.stderr, flush=True)
        medians = {way: statistics.median(found) for way, found in rates.items()}
        ratios = {way: median / medians[STOCK] for way, median in medians.items()}
        for way, median in medians.items():
            print(
                f"{mebibytes:3} MiB  {way:20} {median / 1e9:6.2f} GB/s  ratio {ratios[way]:5.2f}",
                flush=True,
            )
        rows[f"{mebibytes} MiB"] = {"bytes_per_s": rates, "ratios": ratios}
    for comm in comms:
        await comm.write({"way": "end"})
        await comm.read()
        await comm.close()
    pipe.send("end")
    for engine in engines.values():
        await engine.close(DEADLINE_S)
    return rows


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=other_process, args=(there,))
    process.start()
    rows = asyncio.run(measure(here, options.repeats, int((512 << 20) * options.scale)))
    process.join()
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "transport": rows}, file, indent=1)


if __name__ == "__main__":
    main()
