"""Messages over UCX between real processes arrive unchanged, or are refused."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dask_gpurt.errors import ProtocolError, TransportError
from tests.transport.ucx_peer import PATIENCE_S, exchange
from tests.transport.ucx_processes import (
    both_ways,
    engine_here,
    needs_ucxx,
    one_way,
    over_both,
    pair,
    run,
    until,
)

# ------------------------------------------------------------------ messages


@needs_ucxx
@pytest.mark.cluster
@over_both
def test_messages_arrive_intact(options):
    async def scenario():
        async with pair(options) as (engine, other):
            messages = [[], [0], [1], [8191], [8192], [1 << 16], [16 << 20], [3, 0, 1 << 20, 9000]]
            for number, sizes in enumerate([*messages, [100] * 3000, [20_000] * 300]):
                await both_ways(engine, other, number, sizes)
            report = engine.report()
            assert report["sent_nbytes"] == report["received_nbytes"] > 22 << 20
            assert report["peers"] == {other.token: 1}
            assert not report["problems"]

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@over_both
def test_many_messages_are_in_flight_at_once_in_any_order(options):
    async def scenario():
        async with pair(options) as (engine, other):
            numbers = range(60)
            sizes = {n: [n * 11, n * 17_000, 5] for n in numbers}
            # Messages are sent before the receiver asks for them, and received in another order.
            sends = [exchange(engine, other.token, "send", n, sizes[n]) for n in numbers]
            sends = [asyncio.create_task(one) for one in sends]
            sent_back = [
                other.begin("send", peer=engine.token, number=n, sizes=sizes[n]) for n in numbers
            ]
            received = [
                other.begin("receive", peer=engine.token, number=n, sizes=sizes[n])
                for n in reversed(numbers)
            ]
            await asyncio.gather(
                *(
                    exchange(engine, other.token, "receive", n, sizes[n])
                    for n in sorted(numbers, key=lambda n: (n % 7, n))
                ),
                *sends,
            )
            for reply in await asyncio.gather(*sent_back, *received):
                assert "error" not in reply, reply

    run(scenario())


@needs_ucxx
@pytest.mark.cluster
@over_both
@pytest.mark.parametrize(
    ("sent", "announced"),
    [
        ([50_000], [50_001]),
        ([50_000], [49_999]),
        ([10], [11]),
        ([30, 10], [20, 20]),
        ([50_000, 60_000], [60_000, 50_000]),
        ([50_000, 60_000], [50_000]),
        ([10], [10, 0]),
        ([1 << 20, 1 << 20], [2 << 20]),
    ],
)
def test_message_of_other_lengths_is_refused_and_the_link_stays(options, sent, announced):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            # Margins around the announced memory show writes outside of it.
            around = [np.full(size + 4096, 7, dtype=np.uint8) for size in announced]
            buffers = [whole[2048:-2048] for whole in around]
            results = await asyncio.gather(
                there.receive(here.token, 1, buffers, PATIENCE_S),
                exchange(here, there.token, "send", 1, sent),
                return_exceptions=True,
            )
            assert isinstance(results[0], ProtocolError)
            assert results[1] is None  # the sender is done with a refused message
            for whole in around:
                assert (whole[:2048] == 7).all() and (whole[-2048:] == 7).all()
            await one_way(here, there, 2, [50_000])
            await until(lambda: not there.report()["held_nbytes"])

    run(scenario())


@needs_ucxx
@over_both
def test_a_cancelled_receive_writes_nothing(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            buffer = np.zeros(1 << 20, dtype=np.uint8)
            with pytest.raises(TransportError, match="not done within"):
                await there.receive(here.token, 1, [buffer], 0.01)
            cancelled = asyncio.create_task(there.receive(here.token, 2, [buffer], PATIENCE_S))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            for number in (1, 2):
                await exchange(here, there.token, "send", number, [1 << 20])
            assert not buffer.any()
            assert there.report()["dropped_parcels"] == 4
            assert here.report()["peers"] == {there.token: 1}

    run(scenario())


@needs_ucxx
@over_both
def test_a_retracted_message_is_freed_on_both_sides(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            buffer = np.ones(16 << 20, dtype=np.uint8)
            with pytest.raises(TransportError, match="not done within"):
                await here.send(there.token, 1, [buffer], 0.05)
            await until(lambda: there.report().get("dropped_parcels") == 3)
            await until(lambda: not here.report()["held_nbytes"])
            # The retraction may arrive later than the message, and find it dropped.
            with pytest.raises(TransportError, match="was retracted"):
                await there.receive(here.token, 1, [np.zeros_like(buffer)], PATIENCE_S)
            await one_way(here, there, 2, [50_000])

    run(scenario())


@needs_ucxx
@over_both
def test_a_message_that_was_sent_in_full_can_be_retracted(options):
    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            for number in (1, 2):
                await here.send(there.token, number, [np.ones(10, np.uint8)], PATIENCE_S)
            await until(lambda: there.report()["under_way"]["unclaimed_parcels"] == 2)
            here.retract(there.token, 1)
            await until(lambda: there.report()["under_way"]["unclaimed_parcels"] == 1)
            with pytest.raises(TransportError, match="was retracted"):
                await there.receive(here.token, 1, [np.zeros(10, np.uint8)], PATIENCE_S)
            buffer = np.zeros(10, np.uint8)
            await there.receive(here.token, 2, [buffer], PATIENCE_S)
            assert buffer.all()
            here.retract("nobody", 1)  # a peer without links
            await here.send(there.token, 4, [], PATIENCE_S)

    run(scenario())


@needs_ucxx
@over_both
def test_a_retraction_fails_the_receive_that_waits(options):
    """Otherwise the receiver would wait until its deadline, with memory for the message."""

    async def scenario():
        async with engine_here(options) as here, engine_here(options) as there:
            await here.connect(there.descriptor, PATIENCE_S)
            # Nothing of the first message arrives, and of the second only the envelope.
            receives = [
                asyncio.create_task(exchange(there, here.token, "receive", number, [1 << 20]))
                for number in (1, 2)
            ]
            await until(lambda: there.report()["under_way"]["receives"] == 2)
            await exchange(here, there.token, "send", 2, [0])
            for number, receive in enumerate(receives, start=1):
                here.retract(there.token, number)
                with pytest.raises(TransportError, match=f"message {number} .* was retracted"):
                    await receive
            await until(lambda: not any(there.report()["under_way"].values()))
            await until(lambda: not there.report()["held_nbytes"])
            await one_way(here, there, 3, [50_000])

    run(scenario())


@needs_ucxx
def test_one_number_is_received_once_at_a_time():
    async def scenario():
        async with engine_here() as here, engine_here() as there:
            await here.connect(there.descriptor, PATIENCE_S)
            first = asyncio.create_task(exchange(there, here.token, "receive", 1, [10]))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="is being received"):
                await exchange(there, here.token, "receive", 1, [10])
            await exchange(here, there.token, "send", 1, [10])
            await first

    run(scenario())


@needs_ucxx
def test_a_malformed_message_is_refused_before_ucx_sees_it():
    async def scenario():
        async with engine_here() as here:
            words = np.zeros(10, dtype=np.uint16)
            fixed = np.zeros(10, dtype=np.uint8)
            fixed.flags.writeable = False
            for buffers in ([words], [np.zeros(10, np.uint8)[::2]], [np.zeros((2, 5), np.uint8)]):
                with pytest.raises(ValueError, match="contiguous"):
                    await here.send("nobody", 1, buffers, PATIENCE_S)
            with pytest.raises(ValueError, match="read-only"):
                await here.receive("nobody", 1, [fixed], PATIENCE_S)
            with pytest.raises(ValueError, match="numbers are below"):
                await here.send("nobody", 1 << 31, [], PATIENCE_S)
            with pytest.raises(TransportError, match="no UCX link to nobody"):
                await here.send("nobody", 1, [], PATIENCE_S)
            with pytest.raises(TransportError, match="no UCX link to nobody"):
                await here.receive("nobody", 1, [], PATIENCE_S)

    run(scenario())
