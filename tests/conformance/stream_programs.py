"""Random programs over the streams of a device, and their results on a model.

`tests.conformance.device_suite` runs them on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from dask_gpurt.devices.device import Priority


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def add(source, target):
    target += source


def double(target):
    target *= 2


N_STREAMS, N_BUFFERS, LENGTH = 3, 3, 32


@dataclass(frozen=True)
class Step:
    """A step of a program. Its `kind` decides which of its fields are used."""

    kind: str
    stream: int
    target: int
    source: int
    start: int
    nbytes: int
    #: In programs with random waits: the stream to wait for.
    waits: tuple[int, ...]


def programs(n_most=25):
    step = st.builds(
        Step,
        kind=st.sampled_from(["in", "out", "on", "add", "double", "renew"]),
        stream=st.integers(0, N_STREAMS - 1),
        target=st.integers(0, N_BUFFERS - 1),
        source=st.integers(0, N_BUFFERS - 1),
        start=st.integers(0, LENGTH // 2),
        nbytes=st.integers(1, LENGTH // 2),
        waits=st.lists(st.integers(0, N_STREAMS - 1), max_size=2).map(tuple),
    )
    return st.lists(step, min_size=1, max_size=n_most)


@dataclass
class Touched:
    """Events of the last uses of a buffer."""

    written: object = None
    read: list = field(default_factory=list)


def run_program(device, steps, *, in_order=True):
    """Run a program; return what it copies to the host and what it leaves on the device.

    Parameters
    ----------
    in_order
        Wait for all work that a step must come after. Otherwise, wait for what the step names.
    """
    streams = [device.stream(f"s{n}", list(Priority)[n % 3]) for n in range(N_STREAMS)]
    events = [stream.record() for stream in streams]
    buffers, touched = [], []
    for n in range(N_BUFFERS):
        buffers.append(device.allocate(LENGTH, streams[0]))
        streams[0].to_device(buffers[n], noise(LENGTH, n))
        touched.append(Touched(written=streams[0].record()))
    if not in_order:
        for stream in streams[1:]:
            stream.wait(touched[-1].written)
    copied = []
    for number, step in enumerate(steps):
        stream = streams[step.stream]
        target, source = buffers[step.target], buffers[step.source]
        start, nbytes = step.start, step.nbytes
        reads = [step.source] if step.kind in ("on", "add", "out") else []
        writes = [step.target] if step.kind != "out" else []
        if step.kind in ("on", "add") and step.source == step.target:
            continue
        if in_order:
            for n in reads + writes:
                stream.wait(touched[n].written)
            for n in writes:
                for event in touched[n].read:
                    stream.wait(event)
        else:
            for n in step.waits:
                stream.wait(events[n])
        if step.kind == "in":
            stream.to_device(target.part(start, nbytes), noise(nbytes, number))
        elif step.kind == "out":
            copied.append(np.zeros(nbytes, dtype=np.uint8))
            stream.to_host(copied[-1], source.part(start, nbytes))
        elif step.kind == "on":
            stream.on_device(target.part(start, nbytes), source.part(0, nbytes))
        elif step.kind == "add":
            stream.launch(add, [source.part(0, nbytes)], [target.part(start, nbytes)])
        elif step.kind == "double":
            stream.launch(double, writes=[target.part(start, nbytes)])
        elif step.kind == "renew":
            target.free(stream)
            buffers[step.target] = device.allocate(LENGTH, stream)
            stream.to_device(buffers[step.target], noise(LENGTH, 1000 + number))
        event = events[step.stream] = stream.record()
        for n in reads:
            touched[n].read.append(event)
        for n in writes:
            touched[n] = Touched(written=event)
    for stream in streams[1:]:
        streams[0].wait(stream.record())
    left = []
    for buffer in buffers:
        left.append(np.zeros(LENGTH, dtype=np.uint8))
        streams[0].to_host(left[-1], buffer)
    streams[0].synchronize()
    return copied + left


def expected_of(steps):
    """Return the result of the steps in sequence."""
    buffers = [noise(LENGTH, n) for n in range(N_BUFFERS)]
    copied = []
    for number, step in enumerate(steps):
        target, source = buffers[step.target], buffers[step.source]
        at, head = slice(step.start, step.start + step.nbytes), slice(0, step.nbytes)
        if step.kind == "in":
            target[at] = noise(step.nbytes, number)
        elif step.kind == "out":
            copied.append(source[at].copy())
        elif step.kind == "on" and target is not source:
            target[at] = source[head]
        elif step.kind == "add" and target is not source:
            target[at] += source[head]
        elif step.kind == "double":
            target[at] *= 2
        elif step.kind == "renew":
            buffers[step.target] = noise(LENGTH, 1000 + number)
    return copied + buffers


def assert_same(got, expected):
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
