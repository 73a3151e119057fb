"""Shuffles give the right result if messages are lost, repeated, reordered or damaged."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import dask
import pytest
from distributed.comm import CommClosedError

import dask_gpurt
from dask_gpurt.errors import TransportError
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.shuffle.messages import Message
from tests.failure import gates
from tests.failure.gates import Gate
from tests.failure.leftovers import assert_nothing_left
from tests.failure.stage import N_INPUTS, Stage, expected, frame, open_stage
from tests.integration.comparing import assert_same_partitions

pytestmark = pytest.mark.usefixtures("no_tracebacks_kept")

#: Room for one message at a time.
IN_FLIGHT_NBYTES = 64 << 10
#: Retries of a message, after its first attempt.
N_RETRIES = 5


#: Transports between hosts. Within a host, messages have no checksum.
@pytest.fixture(params=["comm", "ucx"])
def transport(request: Any) -> str:
    if request.param == "ucx":
        pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    return str(request.param)


@pytest.fixture
def in_flight_nbytes() -> int:
    return IN_FLIGHT_NBYTES


@pytest.fixture
def stage(transport: str, in_flight_nbytes: int) -> Iterator[Stage]:
    # Each shard is a message, and a retry follows without delay.
    settings = {
        "gpurt.shuffle.message-size": "1 B",
        "gpurt.shuffle.in-flight": in_flight_nbytes,
        "distributed.p2p.comm.retry.count": N_RETRIES,
        "distributed.p2p.comm.retry.delay.min": "0s",
        "distributed.p2p.comm.retry.delay.max": "0s",
    }
    faults.clear()
    with dask.config.set(settings), open_stage(transport) as stage:
        yield stage


#: Faults that a test has caused in messages of this process's workers, in order.
faults: list[str] = []


def assert_same_after_all(stage: Stage) -> None:
    """Check that a later shuffle is undisturbed and takes one run."""
    outputs = stage.shuffle()
    assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    assert stage.paths() == {stage.transport}
    stage.forget(outputs)
    assert_nothing_left(stage.client)
    # A message is counted once, even if it was sent several times.
    (shuffle,) = dask_gpurt.status(stage.client)["shuffles"]
    for unit, figure in [("count", "messages"), ("bytes", "raw_nbytes")]:
        label = ("background-comms", "compress", unit)
        assert sum(stage.client.run(_told, label).values()) == shuffle[figure] > 0


def _told(label: tuple[str, ...], dask_worker: Any) -> float:
    """Return a worker's fine metrics for a label, summed over spans."""
    totals = dask_worker.digests_total.items()
    return sum(value for name, value in totals if name[0] == "p2p" and name[2:] == label)


def assert_one_clear_error(stage: Stage, kind: str, message: str) -> None:
    outputs = stage.shuffle()
    with pytest.raises(RuntimeError, match=r"P2P .* failed during") as caught:
        stage.results(outputs)
    told = str(caught.value) + "".join(map(str, causes(caught.value)))
    assert kind in told
    assert re.search(message, told)
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    stage.forget(outputs)
    assert_nothing_left(stage.client)


def causes(error: BaseException) -> Iterator[str]:
    cause = error.__cause__
    while cause is not None:
        yield repr(cause)
        cause = cause.__cause__


#: Tells whether the n-th call on a worker fails, counted from 1.
Which = Callable[[int], bool]


def _sometimes(number: int) -> bool:
    return number in (2, 5)


def _always(number: int) -> bool:
    return True


async def _connections_fail(worker: Any, which: Which, peers: list[str]) -> None:
    pool = await runtime_of(worker).links.connections.pool()
    connect, numbers = pool.connect, itertools.count(1)

    async def flaky(peer: str, *args: Any, **kwargs: Any) -> Any:
        if peer in peers and which(next(numbers)):
            faults.append("connect")
            raise OSError("no route to host")
        return await connect(peer, *args, **kwargs)

    pool.connect = flaky


async def _writes_fail(worker: Any, which: Which, peers: list[str]) -> None:
    """Make writes of a shuffle's messages fail on existing connections."""
    pool = await runtime_of(worker).links.connections.pool()
    connect, numbers = pool.connect, itertools.count(1)

    def make(write: Any) -> Any:
        async def flaky(message: Any, *args: Any, **kwargs: Any) -> Any:
            if message.get("op") == "shuffle_receive" and which(next(numbers)):
                faults.append("write")
                raise CommClosedError("connection reset by peer")
            return await write(message, *args, **kwargs)

        return flaky

    async def connected(peer: str, *args: Any, **kwargs: Any) -> Any:
        comm = await connect(peer, *args, **kwargs)
        if peer in peers and "write" not in vars(comm):  # the connections are used again
            comm.write = make(comm.write)
        return comm

    pool.connect = connected


async def _ucx_links_fail(worker: Any, which: Which, peers: list[str]) -> None:
    engine = await runtime_of(worker).links.ucx.engine()
    connect, numbers = engine.connect, itertools.count(1)

    async def flaky(*args: Any) -> Any:
        if which(next(numbers)):
            faults.append("connect")
            raise TransportError("no answer to a greeting")
        return await connect(*args)

    engine.connect = flaky


async def _ucx_sends_fail(worker: Any, which: Which, peers: list[str]) -> None:
    """Break the link before the message leaves, with all transfers in flight on it."""
    engine = await runtime_of(worker).links.ucx.engine()
    send, numbers = engine.send, itertools.count(1)

    async def flaky(peer: str, *args: Any) -> Any:
        if which(next(numbers)):
            faults.append("send")
            await engine.disconnect(peer)
        return await send(peer, *args)

    engine.send = flaky


#: Control messages use Dask's connections with every transport.
failing = pytest.mark.parametrize(
    ("transport", "install", "kind", "message"),
    [
        ("comm", _connections_fail, "OSError", "no route to host"),
        ("ucx", _connections_fail, "OSError", "no route to host"),
        ("ucx", _ucx_links_fail, "TransportError", "no answer to a greeting"),
        ("comm", _writes_fail, "CommClosedError", "connection reset by peer"),
        ("ucx", _writes_fail, "CommClosedError", "connection reset by peer"),
        # Depending on the order, the sender or the receiver notices first that the link is gone.
        ("ucx", _ucx_sends_fail, "TransportError", "UCX link to|forgets the link"),
    ],
    indirect=["transport"],
)


@failing
def test_sporadic_connection_failures_are_retried(
    stage: Stage, install: Any, kind: str, message: str
) -> None:
    for sender in stage.addresses("sender"):
        stage.tell(sender, install, _sometimes, stage.addresses("receiver"))
    assert_same_after_all(stage)
    assert faults


@failing
def test_persistent_connection_failures_are_an_error(
    stage: Stage, install: Any, kind: str, message: str
) -> None:
    for sender in stage.addresses("sender"):
        stage.tell(sender, install, _always, stage.addresses("receiver"))
    assert_one_clear_error(stage, kind, message)
    assert len(faults) > N_RETRIES


async def _ucx_thread_ends(worker: Any) -> None:
    engine = await runtime_of(worker).links.ucx.engine()
    send, numbers = engine.send, itertools.count(1)

    def mistake() -> None:
        faults.append("mistake")
        raise ZeroDivisionError

    async def flaky(*args: Any) -> Any:
        if next(numbers) == 3:
            engine._session.call(mistake)
        return await send(*args)

    engine.send = flaky


@pytest.mark.parametrize("transport", ["ucx"], indirect=True)
def test_ucx_restarts_after_an_error_in_its_thread(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    for worker in stage.addresses("sender"):
        stage.tell(worker, _ucx_thread_ends)
    with caplog.at_level(logging.WARNING, logger="dask_gpurt"):
        assert_same_after_all(stage)
    assert faults == ["mistake"] * 2
    assert caplog.text.count("the UCX thread ended: ZeroDivisionError") == 2


def _every_second_answer_is_lost(worker: Any) -> None:
    numbers = itertools.count(1)

    def make(receive: Any) -> Any:
        async def deaf(**message: Any) -> Any:
            answer = await receive(**message)
            if not next(numbers) % 2:
                faults.append("answer")
                raise CommClosedError("connection reset by peer")
            return answer

        return deaf

    gates.replace(worker, "receive", make)


def test_messages_with_lost_answers_are_sent_again(stage: Stage) -> None:
    """The sender cannot know that they arrived, so it sends them again."""
    for receiver in stage.addresses("receiver"):
        stage.tell(receiver, _every_second_answer_is_lost)
    assert_same_after_all(stage)
    assert len(faults) >= N_INPUTS // 2


def test_duplicate_messages_count_once(stage: Stage) -> None:
    # The sender repeats messages, because UCX delivers each only once.
    for sender in stage.addresses("sender"):
        stage.tell(sender, gates.deliver_again, 2, stage.addresses("receiver"))
    assert_same_after_all(stage)


def _every_other_message_waits_for_the_next(worker: Any) -> None:
    numbers = itertools.count()
    overtaken: list[asyncio.Event] = []

    def make(receive: Any) -> Any:
        async def reordered(**message: Any) -> Any:
            if "offers" in message["data"]:
                return await receive(**message)
            if len(faults) < N_SWAPS and not next(numbers) % 2:
                event = asyncio.Event()
                overtaken.append(event)
                await event.wait()
                faults.append("overtaken")
                return await receive(**message)
            answer = await receive(**message)
            while overtaken:
                overtaken.pop().set()
            return answer

        return reordered

    gates.replace(worker, "receive", make)


#: Swaps of messages: one for each pair of inputs, of which every receiver gets messages.
N_SWAPS = N_INPUTS // 2


#: With room for one message, the next one could not leave while this one waits.
@pytest.mark.parametrize("in_flight_nbytes", [1 << 20])
def test_reordered_messages_are_accepted(stage: Stage) -> None:
    stage.tell(stage.addresses("receiver")[0], _every_other_message_waits_for_the_next)
    assert_same_after_all(stage)
    assert len(faults) == N_SWAPS


#: Changes a message.
Change = Callable[[Message], Message]


def _damage(worker: Any, which: Which, peers: list[str], change: Change) -> None:
    """Damage messages to these peers before they leave; copies kept for a retry stay intact."""
    numbers = itertools.count(1)

    def make(deliver: Any) -> Any:
        async def damaged(peer: str, transport: str, compose: Any, call: Any) -> Any:
            async def changed(path: Any) -> Message:
                message: Message = await compose(path)
                if peer not in peers or not which(next(numbers)):
                    return message
                faults.append("damage")
                return change(message)

            return await deliver(peer, transport, changed, call)

        return damaged

    gates.replace(worker, gates.DELIVER, make)


def damage(stage: Stage, which: Which, change: Change) -> None:
    for sender in stage.addresses("sender"):
        stage.tell(sender, _damage, which, stage.addresses("receiver")[:1], change)


def _other_version(message: Message) -> Message:
    header = bytearray(message.header)
    header[3] += 1
    return replace(message, header=bytes(header))


def _no_header(message: Message) -> Message:
    return replace(message, header=b"\0" * len(message.header))


def _cut_header(message: Message) -> Message:
    return replace(message, header=message.header[:-1])


def _cut_payload(message: Message) -> Message:
    return replace(message, buffers=[buffer[:-1] for buffer in message.buffers])


def _lost_payload(message: Message) -> Message:
    return replace(message, buffers=message.buffers[:-1])


def _flipped_bit(message: Message) -> Message:
    first = message.buffers[0].copy()
    first[len(first) // 2] ^= 1
    return replace(message, buffers=[first, *message.buffers[1:]])


@pytest.mark.share(3)
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_version, "install the same dask-gpurt on every worker"),
        (_no_header, "not a shuffle message"),
        (_cut_payload, r"received \d+ of \d+ bytes|bytes (came )?where \d+ were announced"),
        (_lost_payload, r"received \d+ of \d+ buffers|bytes (came )?where \d+ were announced"),
    ],
)
def test_damaged_message_is_one_clear_error(
    stage: Stage, change: Change, message: str, nth: int
) -> None:
    damage(stage, lambda number: number == nth, change)
    assert_one_clear_error(stage, "ProtocolError", message)


@pytest.mark.parametrize("change", [_flipped_bit, _cut_header])
def test_message_that_fails_its_checksum_is_sent_again(stage: Stage, change: Change) -> None:
    damage(stage, _sometimes, change)
    assert_same_after_all(stage)
    assert faults


@pytest.mark.parametrize("change", [_flipped_bit, _cut_header])
def test_persistent_checksum_failures_are_an_error(stage: Stage, change: Change) -> None:
    damage(stage, _always, change)
    assert_one_clear_error(stage, "DamagedError", "3 times in a row a message to tcp://")


def _waiting_nbytes(worker: Any) -> int:
    runs = worker.plugins["shuffle"].heartbeat()
    return max((run["comm"]["memory"] for run in runs.values()), default=0)


def test_producers_wait_for_a_peer_that_stops_reading(stage: Stage) -> None:
    """Queued bytes, for all peers together, stay within the limit or are one shard."""
    with Gate() as gate:
        for receiver in stage.addresses("receiver"):
            stage.tell(receiver, gates.hold, "receive", gate.path)
        outputs = stage.shuffle()
        stage.wait_for_blocked_producers(2)
        for sender in stage.addresses("sender"):
            waiting_nbytes = stage.tell(sender, _waiting_nbytes)
            # The first shard may be larger than the limit.
            partition_nbytes = frame(0).memory_usage(deep=True).sum()
            assert 0 < waiting_nbytes <= max(IN_FLIGHT_NBYTES, partition_nbytes)
    assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    assert stage.paths() == {stage.transport}
    stage.forget(outputs)
    assert_nothing_left(stage.client)


@pytest.mark.share(3)
@pytest.mark.parametrize("credit", [None, 0, True, "much"])
def test_answer_with_nonsense_as_a_credit_is_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, credit: Any
) -> None:
    receive = ExchangeRun.receive

    async def answered(run: ExchangeRun, data: Any) -> Any:
        answer = await receive(run, data)
        return {**answer, "credit": credit} if "credit" in answer else answer

    monkeypatch.setattr(ExchangeRun, "receive", answered)
    assert_one_clear_error(stage, "ProtocolError", "credit")


@pytest.mark.parametrize("sender", [None, 7, "a" * 2000])
def test_message_without_its_sender_is_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, sender: Any
) -> None:
    receive = ExchangeRun.receive

    async def changed(run: ExchangeRun, data: Any) -> Any:
        return await receive(run, {**data, "sender": sender})

    monkeypatch.setattr(ExchangeRun, "receive", changed)
    wanted = "it must be a text of at most 1000 characters"
    assert_one_clear_error(stage, "ProtocolError", wanted)
