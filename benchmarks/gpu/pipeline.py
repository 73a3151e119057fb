"""Section that overlaps copies in, computation and copies out, and compares with serial execution.

The three stages take equally long. The shortest possible time is therefore a third of the serial
time, and two more stages that fill and drain the pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.timing import medians_s, open_device
from dask_gpurt.devices.cuda.driver import why_no_cuda
from dask_gpurt.devices.device import Device, Event, Priority

CHUNK_NBYTES = 64 << 20
N_CHUNKS, N_BUFFERS = 24, 4
REPEATS = 7


def skip_reason() -> str:
    """Return why the section cannot run; empty if it can."""
    return why_no_cuda() or ""


def run(report: Report) -> None:
    """Run the section on the first GPU."""
    from benchmarks.gpu.kernels import add_rounds

    device = open_device(N_BUFFERS * CHUNK_NBYTES)
    pin = device.driver.pin
    host = [pin(CHUNK_NBYTES) for _ in range(2 * N_BUFFERS)]
    for array in host:
        array.fill(1)
    measure(device, host[:N_BUFFERS], host[N_BUFFERS:], add_rounds, N_CHUNKS, REPEATS, report)
    device.close()


def measure(
    device: Device,
    sources: list[np.ndarray],
    targets: list[np.ndarray],
    add: Callable[[Any, int], None],
    n_chunks: int,
    repeats: int,
    report: Report,
) -> None:
    """Report the times of the pipeline, and which results are wrong.

    Parameters
    ----------
    add
        A kernel that adds 1 to each byte, once a round. The number of rounds sets its duration.
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

    # Short kernels take as long as their launch, so the number grows until it fits.
    n_rounds, compute_s = 8, rounds_s(8)
    for _ in range(8):
        n_rounds = max(1, min(16 * n_rounds, round(n_rounds * in_s / compute_s)))
        compute_s = rounds_s(n_rounds)
    # An odd number: 256 rounds would leave each byte as it was.
    n_rounds |= 1
    streams["out"].wait(compute.record())
    out_s = stage_s(lambda: streams["out"].to_host(targets[0], buffers[0]), streams["out"])

    def pass_through(one_stream: bool) -> Callable[[], None]:
        def run_all() -> None:
            inward, work, outward = (streams["in" if one_stream else name] for name in streams)
            copied_out: list[Event | None] = [None] * n_buffers
            for number in range(n_chunks):
                place = number % n_buffers
                buffer = buffers[place]
                if (event := copied_out[place]) is not None:
                    inward.wait(event)
                inward.to_device(buffer, sources[place])
                work.wait(inward.record())
                work.launch(lambda array: add(array, n_rounds), writes=[buffer])
                outward.wait(work.record())
                outward.to_host(targets[place], buffer)
                copied_out[place] = outward.record()
            inward.wait(outward.record())
            inward.synchronize()

        return run_all

    sides = {"serial": pass_through(True), "overlapped": pass_through(False)}
    took_s = medians_s(sides, repeats)
    expected = sources[0][:1] + np.uint8(n_rounds % 256)
    wrong = [n for n, target in enumerate(targets) if not (target == expected).all()]
    total_s = n_chunks * (in_s + compute_s + out_s)
    longest_s = n_chunks * max(in_s, compute_s, out_s)
    report(
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
                "efficiency": (total_s - took_s["overlapped"]) / (total_s - longest_s),
            },
        )
    )
    for buffer in buffers:
        buffer.free(first)
