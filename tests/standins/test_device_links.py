"""UCX engines in two processes, with device memory: the ways it travels, and faults of a device."""

from __future__ import annotations

import pytest

from tests.standins.device_links import (
    SIZES,
    STAGING,
    begin,
    device_pair,
    get,
    message,
    needs_standin,
    put,
    scenario,
    shared_pair,
)
from tests.transport.ucx_processes import needs_ucxx, until_true

pytestmark = [needs_standin, needs_ucxx]

#: Timeout of messages that a fault holds up.
SHORT_S = 0.5
DEVICE_NBYTES = SIZES[0] + SIZES[2]
ARRIVED = ["", ""]


@pytest.fixture(scope="module")
def by_handles():
    with shared_pair({}) as pair:
        yield pair


@pytest.fixture(scope="module")
def by_staging():
    with shared_pair(STAGING) as pair:
        yield pair


@pytest.fixture(params=["by_handles", "by_staging"])
def shared(request):
    return request.getfixturevalue(request.param)


async def copied(sender, receiver):
    """Send a message; return for each end the bytes it copied and the handles it opened."""
    names = ("copied_nbytes", "ipc_opened")
    before = [await get(process, *names) for process in (sender, receiver)]
    assert await message(sender, receiver) == ARRIVED
    after = [await get(process, *names) for process in (sender, receiver)]
    return [
        [late - early for late, early in zip(*pair, strict=True)]
        for pair in zip(after, before, strict=True)
    ]


@scenario
async def test_device_buffers_travel_both_ways(shared):
    sender, receiver = shared.ends
    assert await message(sender, receiver) == ARRIVED
    assert await message(receiver, sender) == ARRIVED


@scenario
async def test_sender_copies_into_memory_it_has_a_handle_of():
    async with device_pair() as (sender, receiver):
        sent, received = await copied(sender, receiver)
        assert sent == [DEVICE_NBYTES, 2] and received[0] == 0


@pytest.mark.parametrize("refusal", [1, 2], ids=["export", "import"])
@scenario
async def test_buffers_are_staged_where_handles_are_refused(refusal):
    async with device_pair(refuse_ipc=refusal) as (sender, receiver):
        assert await copied(sender, receiver) == [[DEVICE_NBYTES, 0]] * 2


@pytest.mark.parametrize("ends", [("send", "receive device"), ("send device", "receive")])
@scenario
async def test_device_and_host_exchange_messages(shared, ends):
    assert await message(*shared.ends, send=ends[0], receive=ends[1]) == ARRIVED


@scenario
async def test_full_device_fails_one_message(shared):
    sender, receiver = shared.ends
    await put("fail_allocation", 1, receiver)
    sent, received = await message(sender, receiver, SHORT_S)
    assert "LateError" in sent and "MemoryError" in received
    assert await message(sender, receiver) == ARRIVED


@scenario
async def test_nearly_full_device_sends_to_the_host():
    # UCX allocates buffers on the receiver's device for that.
    async with device_pair(total_nbytes=128 << 20) as pair:
        assert await message(*pair, receive="receive") == ARRIVED


@scenario
async def test_late_copies_time_out_and_later_ones_arrive(shared):
    sender, receiver = shared.ends
    await put("hold_copies", 1, sender, receiver)
    sent, received = await message(sender, receiver, SHORT_S)
    assert "LateError" in sent and "LateError" in received
    await put("hold_copies", 0, sender, receiver)
    assert await message(sender, receiver) == ARRIVED


@scenario
async def test_event_that_never_fires_ends_in_a_timeout():
    # Both processes end by themselves, which `device_pair` waits for.
    async with device_pair() as (sender, receiver):
        await put("silent_event", 1, sender)
        sent, received = await message(sender, receiver, SHORT_S)
        assert "LateError" in sent and "LateError" in received
        # UCX may still write to it.
        assert (await sender.run("report"))["held_nbytes"] > DEVICE_NBYTES


@scenario
async def test_device_lost_during_a_copy_ends_in_errors():
    async with device_pair() as (sender, receiver):
        await put("hold_copies", 1, sender)
        sending = begin(sender, "send device", receiver, 1000, 2 * SHORT_S)
        receiving = begin(receiver, "receive device", sender, 1000, 2 * SHORT_S)

        # UCX ends its process if it begins a copy on a lost device, so both copies must have begun.
        async def are_copying():
            return await get(sender, "copies") == [2]

        await until_true(are_copying)
        await put("lost", 719, sender)
        await put("hold_copies", 0, sender)
        assert "error" in await sending and "error" in await receiving
        error = (await begin(sender, "send device", receiver, 1001))["error"]
        assert error == "RuntimeError: the stand-in returned error 719"


@scenario
async def test_ucx_hooks_into_a_driver_that_is_far_away():
    # Where the loader puts the libraries decides which kind of jump UCX writes into functions.
    async with device_pair(variables={"UCX_MEM_BISTRO_FORCE_FAR_JUMP": "y"}) as pair:
        assert await message(*pair) == ARRIVED


@pytest.mark.parametrize("options", [{}, STAGING], ids=["handles", "staging"])
@scenario
async def test_context_that_comes_after_ucx_serves_its_thread(options):
    # UCX's calls on streams fail in a thread without a context, which ends the engine.
    async with device_pair(options, at_start=False) as (sender, receiver):
        assert await message(sender, receiver) == ARRIVED
        assert await message(receiver, sender) == ARRIVED


@scenario
async def test_missing_context_ends_the_engine_with_an_error():
    async with device_pair() as (sender, receiver):
        await put("no_context_in", -1, sender)
        await put("hold_copies", 1, sender)
        sent, received = await message(sender, receiver, SHORT_S)
        await put("hold_copies", 0, sender)
        assert "the UCX thread ended" in sent and received
        assert (await sender.run("report"))["is_closed"]


@scenario
async def test_link_dropped_during_a_message_fails_it_alone():
    async with device_pair() as (sender, receiver):
        assert await message(sender, receiver) == ARRIVED
        sending = begin(sender, "send device", receiver, 1000)

        async def has_arrived():
            report = await receiver.run("report")
            return report["under_way"]["unclaimed_parcels"] > 1

        await until_true(has_arrived)
        receiver.process.kill()
        assert "the other side is gone" in (await sending)["error"]
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
        assert "registration cache" in report["problems"][0]
        assert await message(sender, receiver, send="send", receive="receive") == ARRIVED
