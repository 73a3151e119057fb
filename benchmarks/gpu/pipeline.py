"""Copy in, compute, copy out: overlapped by the port's streams and events, against one by one.

The three stages are made to take equally long, so the best that three lanes can do is a third of
the serial time and the two stages that fill and drain the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.report import Row, Say
from benchmarks.gpu.timing import medians_s, open_device
from dask_gpurt.devices.cuda.driver import why_no_cuda
from dask_gpurt.devices.device import Device, Event, Priority

CHUNK_NBYTES = 64 << 20
N_CHUNKS, N_BUFFERS = 24, 4
REPEATS = 7


def why_not() -> str:
    return why_no_cuda() or ""


def run(say: Say) -> None:
    from benchmarks.gpu.kernels import add_rounds

    device = open_device(N_BUFFERS * CHUNK_NBYTES)
    pin = device.driver.pin
    host = [pin(CHUNK_NBYTES) for _ in range(2 * N_BUFFERS)]
    for one in host:
        one.fill(1)
    measure(device, host[:N_BUFFERS], host[N_BUFFERS:], add_rounds, N_CHUNKS, REPEATS, say)
    device.close()


def measure(
    device: Device,
    sources: list[np.ndarray],
    targets: list[np.ndarray],
    add: Callable[[Any, int], None],
    n_chunks: int,
    repeats: int,
    say: Say,
) -> None:
    """The ratio, and what the result of each chunk was.

    Parameters
    ----------
    add
        A kernel that adds 1 to each byte, so many times over: how long it takes is chosen by that.
    """
    n_buffers, nbytes = len(sources), sources[0].nbytes
    streams = {
        "in": device.stream("copies in", Priority.HIGH),
        "compute": device.stream("compute"),
        "out": device.stream("copies out", Priority.HIGH),
    }
    first = streams["in"]
    buffers = [device.allocate(nbytes, first) for _ in range(n_buffers)]
    for stream in streams.values():
        stream.wait(first.record())

    def stage_s(queue: Callable[[], None], stream: Any) -> float:
        took_s = []
        for _ in range(4):
            began = time.perf_counter()
            queue()
            stream.synchronize()
            took_s.append(time.perf_counter() - began)
        return min(took_s)

    in_s = stage_s(lambda: first.to_device(buffers[0], sources[0]), first)
    streams["compute"].wait(first.record())
    compute = streams["compute"]

    def rounds_s(rounds: int) -> float:
        return stage_s(
            lambda: compute.launch(lambda a: add(a, rounds), writes=[buffers[0]]), compute
        )

    # Linear in the rounds: two points give the one that takes as long as a copy.
    few_s, many_s = rounds_s(8), rounds_s(64)
    of_round_s = max((many_s - few_s) / 56, 1e-9)
    n_rounds = max(1, round(8 + (in_s - few_s) / of_round_s))
    compute_s = rounds_s(n_rounds)
    streams["out"].wait(compute.record())
    out_s = stage_s(lambda: streams["out"].to_host(targets[0], buffers[0]), streams["out"])

    def pass_through(one_stream: bool) -> Callable[[], None]:
        def run_all() -> None:
            come, work, go = (streams["in" if one_stream else name] for name in streams)
            emptied: list[Event | None] = [None] * n_buffers
            for number in range(n_chunks):
                place = number % n_buffers
                buffer = buffers[place]
                if (event := emptied[place]) is not None:
                    come.wait(event)
                come.to_device(buffer, sources[place])
                work.wait(come.record())
                work.launch(lambda array: add(array, n_rounds), writes=[buffer])
                go.wait(work.record())
                go.to_host(targets[place], buffer)
                emptied[place] = go.record()
            come.wait(go.record())
            come.synchronize()

        return run_all

    sides = {"serial": pass_through(True), "overlapped": pass_through(False)}
    took_s = medians_s(sides, repeats)
    expected = sources[0][:1] + np.uint8(n_rounds % 256)
    wrong = [n for n, target in enumerate(targets) if not (target == expected).all()]
    parts_s = n_chunks * (in_s + compute_s + out_s)
    longest_s = n_chunks * max(in_s, compute_s, out_s)
    say(
        Row(
            "pipeline of three equal stages",
            took_s["overlapped"],
            "s",
            took_s["overlapped"] / took_s["serial"],
            "seconds overlapped / seconds serial",
            "<= 0.6",
            details={
                "wrong_targets": wrong,
                "chunks": n_chunks,
                "chunk_nbytes": nbytes,
                "rounds": n_rounds,
                "stage_s": {"in": in_s, "compute": compute_s, "out": out_s},
                "took_s": took_s,
                "efficiency": (parts_s - took_s["overlapped"]) / (parts_s - longest_s),
            },
        )
    )
    for buffer in buffers:
        buffer.free(first)
