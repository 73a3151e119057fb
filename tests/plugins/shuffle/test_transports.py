"""A UCX path knows its bandwidth after a few readings of the kernel."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from dask_gpurt.plugins.shuffle.transports import UcxTransport
from dask_gpurt.shuffle.messages import Message


class Engine:
    """An engine that sends everything."""

    token = "sender"

    def __init__(self):
        self.retracted = []

    def retract(self, peer, number):
        self.retracted.append((peer, number))

    def next_number(self):
        return 0

    async def send(self, peer, number, buffers, deadline_s):
        pass


class Readings:
    """Readings of a connection on which each message has the next of these rates."""

    def __init__(self, *rates, quick=True):
        self.rates = list(rates)
        self.quick = quick
        self.asked = []
        self.threads = set()

    def is_quick(self, nbytes):
        return self.quick

    def after(self, nbytes):
        self.asked.append(nbytes)
        self.threads.add(threading.current_thread())
        return self.rates.pop(0)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("rates", "bandwidth"),
    [
        ((90, 100, 100, 100), 100),
        ((None, 90, None, 100), None),
        ((None,) * 4, None),
        ((90, 90, 90, 0), None),
    ],
)
def test_bandwidth_comes_from_the_kernel(rates, bandwidth, quick):
    readings = Readings(*rates, quick=quick)
    engine = Engine()
    path = UcxTransport(engine, "receiver", "tcp://a:1", {}, False, readings)
    message = Message(b"", [np.zeros(3, np.uint8), np.zeros(4, np.uint8)])

    async def taken(data):
        return {"status": "OK"}

    async def carry_all():
        for _ in rates:
            await path.send(message, taken)

    asyncio.run(carry_all())
    assert path.bandwidth == bandwidth
    assert readings.asked == [7] * 4
    assert not engine.retracted
    assert (threading.current_thread() in readings.threads) is quick, "the loop waits"


def test_without_tcp_the_kernel_is_not_asked():
    path = UcxTransport(Engine(), "receiver", "tcp://a:1", {}, False, None)

    async def taken(data):
        return {"status": "OK"}

    asyncio.run(path.send(Message(b"", [np.zeros(3, np.uint8)]), taken))
    assert path.bandwidth is None


def test_a_refused_message_gives_no_reading_and_is_retracted():
    engine = Engine()
    path = UcxTransport(engine, "receiver", "tcp://a:1", {}, False, Readings())

    async def refused(data):
        return {"status": "relink"}

    answer = asyncio.run(path.send(Message(b"", []), refused))
    assert answer["status"] == "relink"
    assert path.bandwidth is None
    # The message may have arrived, and no receiver asks for it.
    assert engine.retracted == [("receiver", 0)]


def test_a_message_whose_receiver_failed_is_retracted():
    engine = Engine()
    path = UcxTransport(engine, "receiver", "tcp://a:1", {}, False, None)

    async def stale(data):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(path.send(Message(b"", []), stale))
    assert engine.retracted == [("receiver", 0)]
