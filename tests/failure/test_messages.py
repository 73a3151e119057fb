"""Messages that are lost, come twice, in another order, damaged or not at all."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import dask
import pytest
from distributed.comm import CommClosedError

from tests.failure import gates
from tests.failure.gates import Gate, pass_gate
from tests.failure.leftovers import assert_nothing_left
from tests.failure.stage import N_INPUTS, Stage, expected, frame, open_stage
from tests.integration.comparing import assert_same_partitions

IN_FLIGHT_NBYTES = 64 << 10


#: What a message holds depends on its way; here it holds everything.
TRANSPORT = "comm"


@pytest.fixture(autouse=True)
def no_tracebacks_kept(caplog: pytest.LogCaptureFixture) -> None:
    """What distributed logs of an error would keep its frames, and buffers in them, alive."""
    caplog.set_level(logging.CRITICAL + 1, logger="distributed")


@pytest.fixture
def stage() -> Iterator[Stage]:
    # A message for each shard, and no time lost between a failure and the next try.
    settings = {
        "gpurt.shuffle.message-size": "1 B",
        "gpurt.shuffle.in-flight": IN_FLIGHT_NBYTES,
        "distributed.p2p.comm.retry.delay.min": "0s",
        "distributed.p2p.comm.retry.delay.max": "0s",
    }
    with dask.config.set(settings), open_stage(TRANSPORT) as stage:
        yield stage


def assert_same_after_all(stage: Stage) -> None:
    """A shuffle that comes now is as if nothing had happened, and is one run."""
    outputs = stage.shuffle()
    assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    stage.let_go_of(outputs)
    assert_nothing_left(stage.client)


def assert_one_clear_error(stage: Stage, kind: str, message: str) -> None:
    outputs = stage.shuffle()
    with pytest.raises(RuntimeError, match=r"P2P .* failed during") as caught:
        stage.results(outputs)
    told = str(caught.value) + "".join(map(str, causes(caught.value)))
    assert kind in told
    assert re.search(message, told)
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    stage.let_go_of(outputs)
    assert_nothing_left(stage.client)


def causes(error: BaseException) -> Iterator[str]:
    cause = error.__cause__
    while cause is not None:
        yield repr(cause)
        cause = cause.__cause__


def _connections_fail(worker: Any, every: int, peers: list[str]) -> None:
    connect, numbers = worker.rpc.connect, itertools.count(1)

    async def flaky(peer: str, *args: Any, **kwargs: Any) -> Any:
        if peer in peers and not next(numbers) % every:
            raise OSError("no route to host")
        return await connect(peer, *args, **kwargs)

    worker.rpc.connect = flaky


def test_connections_that_sometimes_fail(stage: Stage) -> None:
    for sender in stage.addresses("sender"):
        stage.tell(sender, _connections_fail, 3, stage.addresses("receiver"))
    assert_same_after_all(stage)


def test_connections_that_always_fail(stage: Stage) -> None:
    for sender in stage.addresses("sender"):
        stage.tell(sender, _connections_fail, 1, stage.addresses("receiver"))
    assert_one_clear_error(stage, "OSError", "no route to host")


def _every_second_answer_is_lost(worker: Any) -> None:
    numbers = itertools.count(1)

    def make(receive: Any) -> Any:
        async def deaf(**message: Any) -> Any:
            answer = await receive(**message)
            if not next(numbers) % 2:
                raise CommClosedError("connection reset by peer")
            return answer

        return deaf

    gates.replace(worker, "receive", make)


def test_messages_whose_answers_are_lost(stage: Stage) -> None:
    """The sender cannot know that they came, and sends them again."""
    for receiver in stage.addresses("receiver"):
        stage.tell(receiver, _every_second_answer_is_lost)
    assert_same_after_all(stage)


def test_messages_that_come_twice(stage: Stage) -> None:
    for receiver in stage.addresses("receiver"):
        stage.tell(receiver, gates.repeat, "receive", 2)
    assert_same_after_all(stage)


def _every_other_message_waits_for_the_next(worker: Any) -> None:
    numbers = itertools.count()
    overtaken: list[asyncio.Event] = []
    swapped.clear()

    def make(receive: Any) -> Any:
        async def reordered(**message: Any) -> Any:
            if len(swapped) < N_SWAPS and not next(numbers) % 2:
                event = asyncio.Event()
                overtaken.append(event)
                await event.wait()
                swapped.append(True)
                return await receive(**message)
            answer = await receive(**message)
            while overtaken:
                overtaken.pop().set()
            return answer

        return reordered

    gates.replace(worker, "receive", make)


#: One for each pair of inputs that a receiver surely gets messages of.
N_SWAPS = N_INPUTS // 2
swapped: list[bool] = []


def test_messages_that_overtake_each_other(stage: Stage) -> None:
    stage.tell(stage.addresses("receiver")[0], _every_other_message_waits_for_the_next)
    assert_same_after_all(stage)
    assert len(swapped) == N_SWAPS


def damage(point: int, change: Callable[[dict[str, Any]], None]) -> Callable[[Any], None]:
    """What damages a worker's n-th incoming message."""

    def install(worker: Any) -> None:
        numbers = itertools.count(1)

        def make(receive: Any) -> Any:
            async def damaged(data: Any, **message: Any) -> Any:
                if next(numbers) == point:
                    change(data)
                return await receive(data=data, **message)

            return damaged

        gates.replace(worker, "receive", make)

    return install


def _other_version(data: dict[str, Any]) -> None:
    header = bytearray(data["header"])
    header[3] += 1
    data["header"] = bytes(header)


def _no_header(data: dict[str, Any]) -> None:
    data["header"] = b"\0" * len(data["header"])


def _cut_header(data: dict[str, Any]) -> None:
    data["header"] = data["header"][:-1]


def _cut_payload(data: dict[str, Any]) -> None:
    data["payload"] = [memoryview(buffer)[:-1] for buffer in data["payload"]]


def _lost_payload(data: dict[str, Any]) -> None:
    data["payload"] = data["payload"][:-1]


def _flipped_bit(data: dict[str, Any]) -> None:
    first = bytearray(data["payload"][0])
    first[len(first) // 2] ^= 1
    data["payload"] = [first, *data["payload"][1:]]


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_version, "install the same dask-gpurt on every worker"),
        (_no_header, "not a shuffle message"),
        (_cut_payload, r"bytes came of \d+"),
        (_lost_payload, "buffers came of"),
    ],
)
def test_damaged_message_is_one_clear_error(
    stage: Stage, change: Callable[[dict[str, Any]], None], message: str, nth: int
) -> None:
    stage.tell(stage.addresses("receiver")[0], damage(nth, change))
    assert_one_clear_error(stage, "ProtocolError", message)


@pytest.mark.parametrize("change", [_flipped_bit, _cut_header])
def test_message_that_fails_its_checksum_is_sent_again(
    stage: Stage, change: Callable[[dict[str, Any]], None]
) -> None:
    stage.tell(stage.addresses("receiver")[0], damage(1, change))
    assert_same_after_all(stage)


def _hold(worker: Any, path: str) -> None:
    gates.before(worker, "receive", lambda: pass_gate(path))


def _waiting_nbytes(worker: Any) -> int:
    runs = worker.plugins["shuffle"].heartbeat()
    return max((run["comm"]["memory"] for run in runs.values()), default=0)


def test_peer_that_stops_reading(stage: Stage) -> None:
    """Producers wait, and no more waits with them than the limit and what crossed it."""
    with Gate() as gate:
        for receiver in stage.addresses("receiver"):
            stage.tell(receiver, _hold, gate.path)
        outputs = stage.shuffle()
        stage.wait_for_blocked_producers(2)
        for sender in stage.addresses("sender"):
            waiting_nbytes = stage.tell(sender, _waiting_nbytes)
            # Each receiver is a queue of its own; a partition is divided among them.
            partition_nbytes = frame(0).memory_usage(deep=True).sum()
            assert IN_FLIGHT_NBYTES <= waiting_nbytes <= 2 * IN_FLIGHT_NBYTES + partition_nbytes
    assert_same_partitions(stage.results(outputs), expected())
    assert stage.runs() == {"gpurt": 1, "stock": 0}
    stage.let_go_of(outputs)
    assert_nothing_left(stage.client)
