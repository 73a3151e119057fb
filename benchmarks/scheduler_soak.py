"""Throughput and memory growth of a real scheduler with fifty thousand small tasks.

Scheduler and workers are in this process and connected over `inproc://`, so that nearly all time is
spent on scheduling. Rounds with and without placement take turns on the same scheduler. A round
submits every task, waits for all, and releases them. Then the allocator returns free memory to the
system, and the process's memory is read.

    python -m benchmarks.scheduler_soak --rounds 6
    python -m benchmarks.scheduler_soak --tasks 2000 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import statistics
import time
from typing import Any

import psutil
from distributed import Client, Scheduler, Worker, wait

from benchmarks.harness import write_json
from dask_gpurt.plugins.placement.placer import Placement

#: Lowest throughput with placement that is wanted, as a share of the throughput without.
TARGET = 0.97


def start(i: int) -> int:
    """A task without inputs."""
    return i


def follow(one: int, other: int) -> int:
    """A task with two inputs."""
    return one + other


async def one_round(client: Client, n_tasks: int, number: int) -> tuple[float, float]:
    """Run one round; return its seconds and its processor seconds.

    Half of the tasks have no inputs. Each of the others needs two of them.
    """
    half = n_tasks // 2
    began, worked = time.perf_counter(), time.process_time()
    roots = client.map(start, range(half), key=f"start-{number}", pure=False)
    users = client.map(
        follow, roots, roots[1:] + roots[:1], key=f"follow-{number}", pure=False, batch_size=None
    )
    await wait(users)
    elapsed_s, worked_s = time.perf_counter() - began, time.process_time() - worked
    del roots, users
    scheduler = client.cluster_scheduler  # type: ignore[attr-defined]
    while scheduler.tasks:
        await asyncio.sleep(0.005)
    return elapsed_s, worked_s


def memory_nbytes() -> int:
    """Return the memory of this process, after the allocator has returned free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


async def soak(n_tasks: int, rounds: int, n_workers: int) -> dict[str, Any]:
    """Run rounds of both sides in turns."""
    found: dict[str, Any] = {"tasks": n_tasks, "workers": n_workers}
    times: dict[str, list[float]] = {"stock": [], "gpurt": []}
    work: dict[str, list[float]] = {"stock": [], "gpurt": []}
    memory: dict[str, list[int]] = {"stock": [], "gpurt": []}
    async with Scheduler(protocol="inproc://", dashboard_address=None, port=0) as scheduler:
        workers = [await Worker(scheduler.address, nthreads=2) for _ in range(n_workers)]
        async with Client(scheduler.address, asynchronous=True) as client:
            client.cluster_scheduler = scheduler  # type: ignore[attr-defined]
            await one_round(client, n_tasks, 0)
            number = 0
            for turn in range(rounds):
                order = ["stock", "gpurt"] if turn % 2 else ["gpurt", "stock"]
                for side in order:
                    number += 1
                    placement = Placement(scheduler, "data-aware") if side == "gpurt" else None
                    elapsed_s, worked_s = await one_round(client, n_tasks, number)
                    times[side].append(elapsed_s)
                    work[side].append(worked_s)
                    if placement is not None:
                        placement.close()
                        assert not placement.log.n_failed
                        del placement
                    memory[side].append(memory_nbytes())
                    print(
                        f"  {side:6} {n_tasks / elapsed_s:7.0f} tasks/s"
                        f"  {worked_s / n_tasks * 1e6:7.0f} us of processor a task"
                        f"  {memory[side][-1] / 2**20:7.1f} MiB",
                        flush=True,
                    )
        for worker in workers:
            await worker.close()
    found["seconds"], found["processor_s"], found["memory_nbytes"] = times, work, memory
    for what, taken in (("throughput", times), ("processor", work)):
        one, other = (statistics.median(taken[side]) for side in ("stock", "gpurt"))
        found[f"{what}_ratio"] = one / other
    found["grown_nbytes"] = {side: of[-1] - of[0] for side, of in memory.items()}
    return found


async def keep_on(n_tasks: int, rounds: int, n_workers: int) -> dict[str, Any]:
    """Run all rounds with one placement, to see whether it keeps data of finished tasks."""
    async with Scheduler(protocol="inproc://", dashboard_address=None, port=0) as scheduler:
        workers = [await Worker(scheduler.address, nthreads=2) for _ in range(n_workers)]
        async with Client(scheduler.address, asynchronous=True) as client:
            client.cluster_scheduler = scheduler  # type: ignore[attr-defined]
            placement = Placement(scheduler, "data-aware")
            memory = []
            for number in range(rounds + 1):
                await one_round(client, n_tasks, number)
                memory.append(memory_nbytes())
                print(f"  kept on {memory[-1] / 2**20:7.1f} MiB", flush=True)
            placement.close()
        for worker in workers:
            await worker.close()
    # The first round does not count: it fills records of bounded size, such as the log.
    return {"memory_nbytes": memory, "grown_nbytes": memory[-1] - memory[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each side")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = asyncio.run(soak(options.tasks, options.rounds, options.workers))
    found["kept_on"] = asyncio.run(keep_on(options.tasks, options.rounds, options.workers))
    print(
        f"throughput {found['throughput_ratio']:.3f} of stock's (at least {TARGET:g}),"
        f" by the processor's time {found['processor_ratio']:.3f};"
        f" memory grown by {found['grown_nbytes']['gpurt'] / 2**20:.1f} MiB"
        f" (stock {found['grown_nbytes']['stock'] / 2**20:.1f} MiB),"
        f" kept on {found['kept_on']['grown_nbytes'] / 2**20:.1f} MiB"
    )
    if options.json:
        write_json(options.json, [], scheduler_soak=found)


if __name__ == "__main__":
    main()
