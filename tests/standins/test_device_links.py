"""UCX engines in two processes, with device memory: the ways it travels, and faults of a device."""

from __future__ import annotations

import asyncio

import pytest

from tests.standins.device_links import (
    SIZES,
    STAGING,
    begin_receive,
    begin_send,
    counters,
    device_pair,
    message,
    needs_standin,
    scenario,
)
from tests.transport.ucx_processes import needs_ucxx, until_true

pytestmark = [needs_standin, needs_ucxx]

#: Timeout of messages that a fault holds up.
SHORT_S = 0.5
DEVICE_NBYTES = SIZES[0] + SIZES[2]


@scenario
async def test_device_buffers_travel_by_handles_of_memory():
    async with device_pair() as (sender, receiver):
        assert await message(sender, receiver, 0) == ["", ""]
        assert await message(receiver, sender, 0) == ["", ""]
        for process in (sender, receiver):
            n_copies, n_nbytes, n_opened = await counters(
                process, "copies", "copied_nbytes", "ipc_opened"
            )
            # One copy for each buffer, from the one device to the other.
            assert (n_copies, n_nbytes) == (2, DEVICE_NBYTES)
            assert n_opened > 0


@scenario
async def test_device_buffers_travel_through_staging_buffers():
    async with device_pair(STAGING) as (sender, receiver):
        assert await message(sender, receiver, 0) == ["", ""]
        for process in (sender, receiver):
            n_nbytes, n_handles = await counters(process, "copied_nbytes", "ipc_handles")
            assert (n_nbytes, n_handles) == (DEVICE_NBYTES, 0)


@pytest.mark.parametrize("options", [{}, STAGING], ids=["handles", "staging"])
@pytest.mark.parametrize("end", ["send", "receive"])
@scenario
async def test_device_and_host_exchange_a_message(options, end):
    async with device_pair(options) as (sender, receiver):
        await sender.run("connect", descriptor=receiver.descriptor)
        host = {"number": 0, "sizes": SIZES}
        if end == "send":
            ends = (
                sender.begin("send", peer=receiver.token, **host),
                begin_receive(sender, receiver, 0),
            )
        else:
            ends = (
                begin_send(sender, receiver, 0),
                receiver.begin("receive", peer=sender.token, **host),
            )
        assert [reply.get("error") for reply in await asyncio.gather(*ends)] == [None, None]


@pytest.mark.parametrize("refusal", [1, 2], ids=["export", "import"])
@scenario
async def test_buffers_are_staged_where_handles_are_refused(refusal):
    async with device_pair(refuse_ipc=refusal) as (sender, receiver):
        assert await message(sender, receiver, 0) == ["", ""]
        for process in (sender, receiver):
            assert await counters(process, "copied_nbytes", "ipc_opened") == [DEVICE_NBYTES, 0]


@scenario
async def test_full_device_fails_its_end_and_no_later_message():
    async with device_pair(STAGING) as (sender, receiver):
        await receiver.run("put", name="fail_allocation", value=1)
        sent, received = await message(sender, receiver, 0, SHORT_S)
        assert "LateError" in sent and "MemoryError" in received
        assert await message(sender, receiver, 1) == ["", ""]


@pytest.mark.parametrize("options", [{}, STAGING], ids=["handles", "staging"])
@scenario
async def test_late_copies_time_out_and_later_ones_arrive(options):
    async with device_pair(options) as (sender, receiver):
        for process in (sender, receiver):
            await process.run("put", name="hold_copies", value=1)
        sent, received = await message(sender, receiver, 0, SHORT_S)
        assert "LateError" in sent and "LateError" in received
        for process in (sender, receiver):
            await process.run("put", name="hold_copies", value=0)
        assert await message(sender, receiver, 1) == ["", ""]


@scenario
async def test_event_that_never_fires_ends_in_a_timeout():
    async with device_pair() as (sender, receiver):
        await sender.run("put", name="silent_event", value=1)
        sent, received = await message(sender, receiver, 0, SHORT_S)
        assert "LateError" in sent and "LateError" in received
        report = await sender.run("report")
        # UCX may still write to it.
        assert report["held_nbytes"] > DEVICE_NBYTES
        # Both processes end by themselves, which `device_pair` waits for.


@pytest.mark.parametrize("options", [{}, STAGING], ids=["handles", "staging"])
@scenario
async def test_peers_of_a_lost_device_are_told_in_time(options):
    async with device_pair(options) as (sender, receiver):
        await receiver.run("put", name="lost", value=719)
        sent, received = await message(sender, receiver, 0, SHORT_S)
        assert "LateError" in sent
        assert received == "RuntimeError: the stand-in returned error 719"


@scenario
async def test_context_that_comes_after_ucx_serves_its_thread():
    # UCX's calls on streams fail in a thread without a context, and no event wakes it again.
    async with device_pair(at_start=False) as (sender, receiver):
        assert await message(sender, receiver, 0) == ["", ""]
        assert await message(receiver, sender, 0) == ["", ""]


async def drop_during_a_message(sender, receiver):
    """Kill the receiver of a message that it has not asked for; return the sender's error."""
    assert await message(sender, receiver, 0) == ["", ""]
    sending = begin_send(sender, receiver, 1)

    async def has_arrived():
        report = await receiver.run("report")
        return report["under_way"]["unclaimed_parcels"] > 1

    await until_true(has_arrived)
    receiver.process.kill()
    return (await sending)["error"]


@scenario
async def test_link_dropped_during_a_message_fails_it_alone():
    async with device_pair() as (sender, receiver):
        assert "the other side is gone" in await drop_during_a_message(sender, receiver)
        # It still serves: without a registration cache UCX has crashed by now.
        assert (await sender.run("report"))["peers"] == {}


@pytest.mark.parametrize(
    "variables",
    [{"UCX_MEM_EVENTS": "n"}, {"UCX_RCACHE_ENABLE": "n"}],
    ids=["no hooks", "switched off"],
)
@scenario
async def test_ucx_without_registration_cache_leaves_devices(variables):
    async with device_pair(variables=variables) as (sender, receiver):
        report = await sender.run("report")
        assert not [name for name in report["transports"] if name.startswith("cuda")]
        host = {"number": 0, "sizes": SIZES}
        sending = sender.begin("send", peer=receiver.token, **host)
        await receiver.run("receive", peer=sender.token, **host)
        assert "error" not in await sending
