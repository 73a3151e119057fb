"""Costs and bounds of sending a shuffle to very many peers, without as many machines.

- *held*: five hundred peers never answer. Bytes that wait on a worker of 8 GB.
- *incast*: 64 senders with connections of their own meet at one receiver of 512 MB, a process that
  takes its time. Growth of its memory.
- *flush*: every peer has one message, and they answer one by one. Time of the event loop.
- *message size*: the question for the size of the next message, with many known paths.
- *messages*: small inputs, two workers. Messages for 512 inputs of 1 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pandas as pd
from dask.dataframe import from_delayed
from distributed import Client, LocalCluster, Worker, wait
from distributed.core import ConnectionPool, Server
from distributed.protocol import to_serialize

import dask_gpurt
from benchmarks.harness import arguments, machine
from dask_gpurt import config
from dask_gpurt.plugins.shuffle.messenger import Messenger
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle import credits
from dask_gpurt.shuffle.credits import RecentSenders
from dask_gpurt.transport.sending.outbox import Outbox
from dask_gpurt.transport.sending.send_budget import SendBudget

MIB = 1 << 20
WORKER_NBYTES = 8 * 10**9
RECEIVER_NBYTES = 512 * 10**6
MESSAGE_NBYTES = 8 * MIB
N_SENDERS = 64
N_INPUTS = 512
#: How long the receiver keeps each message.
KEEPS_S = 0.2


@dataclass(frozen=True)
class Shard:
    nbytes: int


def outbox(send: Any, budget: SendBudget, pace: Any = None) -> Outbox[Shard]:
    """Make an outbox on the running loop; without a pace, messages are as the settings say."""
    pace = pace or (lambda: (MESSAGE_NBYTES, 2))
    return Outbox(
        send,
        asyncio.get_running_loop(),
        budget=budget,
        message_nbytes=lambda peer: pace()[0],
        concurrency=lambda peer: pace()[1],
    )


def held_nbytes(n_peers: int, memory_nbytes: int) -> int:
    """Return the bytes that wait when no peer answers and producers go as far as they may."""

    async def silent(peer: str, shards: Any) -> None:
        await asyncio.Event().wait()

    async def run() -> int:
        budget = SendBudget(config.read().shuffle.in_flight_nbytes(memory_nbytes))
        box = outbox(silent, budget)

        def produce() -> None:
            for _ in range(32):
                for number in range(n_peers):
                    box.put(f"peer {number}", [Shard(MIB)])

        producer = asyncio.create_task(asyncio.to_thread(produce))
        before = -1
        while before != box.waiting_nbytes:
            before = box.waiting_nbytes
            await asyncio.sleep(0.2)
        await box.close()
        await producer
        return before

    return asyncio.run(run())


def _receive(pipe: Any, is_limited: bool) -> None:
    """Run the receiver of `incast`: keep each message for a while, then answer with a credit."""
    senders = RecentSenders(RECEIVER_NBYTES)

    async def keep(data: Any, sender: str) -> int:
        senders.note(sender, time.monotonic())
        await asyncio.sleep(KEEPS_S)
        del data
        return senders.credit_nbytes(1) if is_limited else RECEIVER_NBYTES

    async def run() -> None:
        server = Server({"keep": keep})
        await server.listen("tcp://127.0.0.1:0")
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pipe.send(server.address)
        await asyncio.to_thread(pipe.recv)
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) << 10)
        await server.close()

    asyncio.run(run())


def incast_nbytes(n_senders: int, is_limited: bool, nbytes_each: int = 32 * MIB) -> int:
    """Return how much memory a receiver needs at most for messages that arrive."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs, is_limited), daemon=True)
    receiver.start()
    address = ours.recv()
    buffer = np.ones(2 * MESSAGE_NBYTES, np.uint8)

    async def send_all(number: int) -> None:
        first = credits.part_nbytes(RECEIVER_NBYTES, n_senders) if is_limited else RECEIVER_NBYTES
        allowed = [first]
        async with ConnectionPool() as pool:

            async def send(peer: str, shards: Any) -> None:
                nbytes = sum(shard.nbytes for shard in shards)
                message = to_serialize(buffer[:nbytes].data)
                allowed[0] = await pool(peer).keep(data=message, sender=f"sender {number}")

            box = outbox(
                send,
                SendBudget(1 << 40),
                lambda: credits.pace(MESSAGE_NBYTES, credits.checked(allowed[0])),
            )
            box.put(address, [Shard(MIB)] * (nbytes_each // MIB))
            await box.flush()

    async def run() -> None:
        await asyncio.gather(*(send_all(number) for number in range(n_senders)))

    asyncio.run(run())
    ours.send("done")
    nbytes = int(ours.recv())
    receiver.join()
    return nbytes


def flush_s(n_peers: int) -> float:
    """Return the time of the event loop to flush one message to each peer."""

    async def run() -> float:
        unanswered: list[asyncio.Future[None]] = []

        async def answered(peer: str, shards: Any) -> None:
            answer = asyncio.get_running_loop().create_future()
            unanswered.append(answer)
            await answer

        box = outbox(answered, SendBudget(1 << 40))
        for number in range(n_peers):
            box.put(f"peer {number}", [Shard(1)])
        began_s = time.thread_time()
        flushing = asyncio.create_task(box.flush())
        while not flushing.done():
            await asyncio.sleep(0)
            if unanswered:
                unanswered.pop().set_result(None)
        return time.thread_time() - began_s

    return min(asyncio.run(run()) for _ in range(3))


@contextlib.contextmanager
def cluster(n_workers: int, processes: bool) -> Iterator[Client]:
    options = {"n_workers": n_workers, "threads_per_worker": 1, "dashboard_address": None}
    with (
        dask.config.set({"gpurt.shuffle.transport": "comm"}),
        LocalCluster(processes=processes, protocol="tcp://", **options) as workers,
        Client(workers) as client,
    ):
        dask_gpurt.enable(client)
        yield client


async def _message_size_s(dask_worker: Worker, n_paths: int) -> float:
    """Return the time to find the size of a message, where every eighth peer is on the host."""
    run: Any = SimpleNamespace(id="", run_id=0, outgoing_memory=None, memory_for=None)
    settings = config.read().shuffle
    adapter: Any = SimpleNamespace()
    links = runtime_of(dask_worker).links
    names = [f"tcp://10.0.{number // 250}.{number % 250}:1" for number in range(n_paths)]
    messenger = Messenger(run, dask_worker, settings, adapter, names, len(names))
    for number, name in enumerate(names):

        async def call(data: Any, is_far: int = number % 8) -> Any:
            return {"status": "OK", "ours": [], "why_not": "far away" if is_far else None}

        await links._path(name, settings.transport, call)
    await asyncio.sleep(0)
    began_s = time.perf_counter()
    for name in names:
        messenger.message_nbytes(name)
    return (time.perf_counter() - began_s) / n_paths


def message_size_s(n_paths: int) -> float:
    with (
        cluster(1, processes=False) as client,
        dask.config.set({"gpurt.shuffle.transport": "auto"}),
    ):
        (seconds,) = client.run(partial(_message_size_s, n_paths=n_paths)).values()
        return float(seconds)


def _frame(number: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    n_rows = 10**6 // 16
    return pd.DataFrame({"key": rng.integers(0, 1 << 30, n_rows), "value": rng.random(n_rows)})


def n_messages(n_inputs: int) -> tuple[int, float]:
    """Return the messages of a shuffle of small inputs between two workers, and its seconds."""
    with cluster(2, processes=True) as client:
        parts = client.map(_frame, range(n_inputs), pure=False)
        wait(parts)
        lazy = from_delayed(parts, meta=_frame(0).iloc[:0], verify_meta=False)
        began_s = time.perf_counter()
        wait(lazy.shuffle("key", npartitions=16).persist())
        seconds = time.perf_counter() - began_s
        workers = dask_gpurt.status(client)["workers"].values()
        return sum(one["counters"]["messages"] for one in workers), seconds


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows: list[tuple[str, str, str]] = []

    def row(what: str, found: str, wanted: str) -> None:
        rows.append((what, found, wanted))
        print(f"{what:58} {found:>22}   {wanted}", flush=True)

    row("held for 500 silent peers", f"{held_nbytes(500, WORKER_NBYTES) / 1e6:.0f} MB", "400 MB")
    for is_limited in (False, True):
        grown = incast_nbytes(N_SENDERS, is_limited) / 1e6
        name = "with credits" if is_limited else "without"
        row(f"incast of 64 senders, {name}", f"{grown:.0f} MB", "128 MB" if is_limited else "")
    few_s, many_s = flush_s(1000), flush_s(2000)
    row("flush of 1,000 peers", f"{1e3 * few_s:.0f} ms", "")
    row("flush of 2,000 peers", f"{1e3 * many_s:.0f} ms", "200 ms")
    row("2,000 peers to 1,000", f"{many_s / few_s:.2f}", "2.2")
    row("message size with 1,000 paths", f"{1e6 * message_size_s(1000):.1f} us", "5 us")
    found, seconds = n_messages(N_INPUTS)
    row("messages for 512 inputs of 1 MB, two workers", f"{found} in {seconds:.2f} s", "")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
