"""A trace has all messages, tasks and lanes of a cluster, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections import Counter
from unittest import mock

import dask
import pytest
from distributed import Client, Nanny, Worker, wait
from distributed.utils_test import async_poll_for, gen_cluster, inc

import dask_gpurt
from dask_gpurt.errors import TraceFileError, TraceInProgressError, TracingError
from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.plugins.tracing import traced_worker
from dask_gpurt.plugins.tracing.ledger_hook import TRACE
from dask_gpurt.plugins.worker.worker_runtime import runtime_of
from dask_gpurt.tracing.lane_names import FETCH, PHASE, RELAY
from tests.integration.traced import (
    N_PARTS,
    assert_messages_match,
    assert_received,
    message_ends,
    part,
    shuffled,
    trace_files,
)

ON = {"gpurt.enabled": True, "gpurt.strict": True}
TWO = [("127.0.0.1", 2)] * 2
#: Two addresses of this machine stand for two hosts.
FOUR = [("127.0.0.1", 1)] * 2 + [("127.0.0.2", 1)] * 2


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.json"


def nothing_is_left(s, *workers):
    assert TRACE not in s.extensions
    assert not [name for name in (*s.plugins, *s.worker_plugins) if "gpurt-trace" in name]
    assert not [name for name in s.handlers if "gpurt_trace" in name]
    for one in workers:
        assert TRACE not in one.extensions
        assert not [name for name in one.handlers if "gpurt_trace" in name]
        if (runtime := one.extensions.get("gpurt")) is not None:
            assert runtime.ledger.recorder is None
    assert not list(trace_files(*(one.local_directory for one in workers)))


@pytest.mark.parametrize(
    ("nthreads", "settings", "ways"),
    [
        (TWO, {}, {"shared memory"}),
        (TWO, {"gpurt.shuffle.transport": "comm"}, {"tcp"}),
        (FOUR, {"gpurt.shuffle.routing": "two-level"}, {"tcp", "shared memory"}),
    ],
)
def test_sends_equal_counters_and_have_their_receives(file, nthreads, settings, ways):
    @gen_cluster(client=True, nthreads=nthreads, config=ON | settings)
    async def test(c, s, *workers):
        async with dask_gpurt.trace(c, file) as traced:
            await c.compute(shuffled())
        trace = traced.trace
        assert_messages_match(trace)
        sends, receives = message_ends(trace)
        assert {one.way for one in sends.values()} <= ways
        assert {one.way for one in receives.values()} <= ways
        has_relays = any(one.path == RELAY for one in sends.values())
        assert has_relays == ("gpurt.shuffle.routing" in settings)
        (run,) = {one.run for one in (*sends.values(), *receives.values())}
        assert run > 0
        nothing_is_left(s, *workers)
        assert file.exists()

    test()


COMM = {"gpurt.shuffle.transport": "comm"}


@pytest.mark.parametrize(
    ("settings", "is_encoded"),
    [({}, False), (COMM, False), (COMM | {"gpurt.shuffle.compression": "lz4"}, True)],
)
def test_sends_have_their_bytes_on_the_link(file, settings, is_encoded):
    @gen_cluster(client=True, nthreads=TWO, config=ON | settings)
    async def test(c, s, *workers):
        async with dask_gpurt.trace(c, file) as traced:
            await c.compute(shuffled())
        sends, receives = message_ends(traced.trace)
        assert {0 < one.encoded_nbytes < one.nbytes for one in sends.values()} == {is_encoded}
        assert not any(one.encoded_nbytes for one in receives.values())
        sums = (runtime_of(one).links.sent.snapshot().values() for one in workers)
        on_links = sum(found.nbytes for of_worker in sums for found in of_worker)
        assert on_links == sum(one.encoded_nbytes or one.nbytes for one in sends.values())

    test()


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_a_trace_has_tasks_phases_fetches_and_samples(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/x.json") as traced:
            here, there = (one.address for one in workers)
            one = c.submit(inc, 1, workers=[here])
            await c.submit(inc, one, workers=[there])
            await c.compute(shuffled())
            samples = {one: len(list(one.extensions[TRACE]._values())) for one in workers}
    trace = traced.trace
    tasks = {task.number: task for task in trace.tasks}
    assert {task.key for task in trace.tasks} >= {"inc", "shuffle-barrier"}
    assert any(task.key.endswith("shuffle-transfer") for task in trace.tasks)
    (second,) = [task for task in trace.tasks if task.key == "inc" and task.needs]
    assert tasks[second.needs[0]].key == "inc"
    for task in trace.tasks:
        times = task.ready_s, task.assigned_s, task.here_s, task.start_s, task.end_s, task.known_s
        assert sorted(times) == list(times)
        assert all(tasks[one].known_s <= task.assigned_s for one in task.needs)
        assert task.thread
    # `shuffled` makes its inputs in the same graph.
    of_graph = [task.submitted_s for task in trace.tasks if task.key != "inc"]
    assert max(of_graph) - min(of_graph) < 2e-3
    first_s, second_s = (task.submitted_s for task in trace.tasks if task.key == "inc")
    assert 0 < first_s <= second_s + 2e-3 <= min(of_graph) + 4e-3
    phases = [one for one in trace.work if one.lane == PHASE]
    assert Counter(one.path for one in phases) == dict.fromkeys(
        ("partition", "held_back", "unpack"), N_PARTS
    )
    for one in phases:
        task = tasks[one.task]
        assert task.process == one.process and task.thread == one.thread
        # Both clocks were read by one process, and differ by their rounding alone.
        assert task.start_s - 1e-3 <= one.start_s <= one.end_s <= task.end_s + 1e-3
    fetches = [one for one in trace.work if one.lane == FETCH and one.task == second.number]
    assert [(one.peer, one.nbytes > 0) for one in fetches] == [(here, True)]
    assert all(samples.values())
    assert trace.processes[0].kind == "scheduler" and trace.about["runtime"] == "on"


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_samples_have_bytes_by_tier_and_rates(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/x.json") as traced:
            for one in workers:
                one.extensions[TRACE]._sample()
                one.extensions[TRACE]._sample()
    names = {one.name for one in traced.trace.samples}
    assert names >= {"cpu", "bytes: process", "bytes: shards", "bytes: memory", "bytes: disk"}
    assert names >= {"bytes: waiting to be sent", "bytes a second: sent"}
    assert {one.process for one in traced.trace.samples} == {1, 2}


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_keys_are_prefixes_unless_wanted(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        for keys in ("prefix", "full"):
            file = f"{folder}/{keys}.json"
            async with dask_gpurt.trace(c, file, keys=keys):
                await c.submit(inc, 1, key=("inc-0123abcd", f"customer {keys}"))
            with open(file) as lines:
                assert ("customer" in lines.read()) == (keys == "full")
    with pytest.raises(ValueError, match="it may be 'prefix' or 'full'"):
        dask_gpurt.trace(c, "x", keys="some")


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_a_second_trace_is_one_clear_error(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            async with Client(s.address, asynchronous=True) as other:
                with pytest.raises(TraceInProgressError, match="close that client"):
                    async with dask_gpurt.trace(other, f"{folder}/2.json"):
                        pytest.fail("the block must not run")
            await c.compute(shuffled())
        assert_messages_match(traced.trace)
        nothing_is_left(s, *workers)
        async with dask_gpurt.trace(c, f"{folder}/3.json") as traced:
            await c.compute(shuffled())
        assert_messages_match(traced.trace)


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_a_client_that_goes_away_ends_its_trace(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with Client(s.address, asynchronous=True) as other:
            await dask_gpurt.trace(other, f"{folder}/1.json").__aenter__()
            assert [*trace_files(*(one.local_directory for one in workers))]
            session = s.extensions[TRACE]
        await async_poll_for(lambda: session._closing is not None, timeout=60)
        await session._closing
        nothing_is_left(s, *workers)
        async with dask_gpurt.trace(c, f"{folder}/2.json"):
            pass


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_a_client_that_goes_away_before_the_begin(c, s, *workers):
    may_tell, register = asyncio.Event(), s.register_worker_plugin

    async def told_late(*arguments, **more):
        await may_tell.wait()
        return await register(*arguments, **more)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(s, "register_worker_plugin", told_late),
    ):
        other = await Client(s.address, asynchronous=True)
        entering = asyncio.ensure_future(dask_gpurt.trace(other, f"{folder}/1.json").__aenter__())
        await async_poll_for(lambda: TRACE in s.extensions, timeout=60)
        session = s.extensions[TRACE]
        await async_poll_for(lambda: session._telling is not None, timeout=60)
        await other.close()
        await async_poll_for(lambda: session._closing is not None, timeout=60)
        may_tell.set()
        await session._closing
        await asyncio.wait({entering}, timeout=60)
        assert entering.exception() is not None
        nothing_is_left(s, *workers)
        assert "gpurt-trace-clocks" not in [one.get_name() for one in asyncio.all_tasks()]


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_a_client_closed_in_the_block_is_an_error(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(TracingError, match="the client was closed"):
            async with dask_gpurt.trace(c, f"{folder}/1.json"):
                session = s.extensions[TRACE]
                await c.close()
        await async_poll_for(lambda: session._closing is not None, timeout=60)
        await session._closing
        nothing_is_left(s, *workers)


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_errors_of_the_block_pass_and_the_file_is_written(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        traced = dask_gpurt.trace(c, f"{folder}/1.json")
        with pytest.raises(ZeroDivisionError):
            async with traced:
                await c.submit(lambda: 1 / 0)
        assert "task failed" in {one.name for one in traced.trace.instants}
        nothing_is_left(s, *workers)
        with pytest.raises(TraceFileError, match="no folder"):
            async with dask_gpurt.trace(c, f"{folder}/none/1.json"):
                pytest.fail("the block must not run")
        with pytest.raises(TypeError, match="this client is asynchronous"):
            dask_gpurt.trace(c, f"{folder}/1.json").__enter__()


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_the_runtime_may_be_switched_in_the_block(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            await c.compute(shuffled())
            await dask_gpurt.disable(c)
            await c.submit(inc, 1)
            await dask_gpurt.enable(c)
            await c.compute(shuffled())
            await dask_gpurt.disable(c)
        assert_messages_match(traced.trace)
        assert "inc" in {task.key for task in traced.trace.tasks}
        nothing_is_left(s, *workers)


@gen_cluster(client=True, nthreads=TWO, config={"gpurt.enabled": False})
async def test_without_the_runtime_there_are_tasks(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            await c.compute(shuffled())
    trace = traced.trace
    assert trace.about["runtime"] == "not switched on for this cluster"
    assert "no messages and no lanes" in traced.note
    assert Counter(task.key for task in trace.tasks)["shuffle-transfer"] == N_PARTS
    assert not trace.work
    assert all(one.clock_error_s < 1 and not one.ended for one in trace.processes)


@gen_cluster(client=True, nthreads=TWO, config={"gpurt.enabled": False})
async def test_the_runtime_may_be_switched_on_in_the_block(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            with dask.config.set(ON):
                await dask_gpurt.enable(c)
            await c.compute(shuffled())
        assert_messages_match(traced.trace)
        nothing_is_left(s, *workers)


@gen_cluster(client=True, nthreads=TWO, config=ON | {"gpurt.trace.limit": "20 kiB"})
async def test_at_the_limit_the_trace_says_so(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            for _ in range(3):
                await c.gather(c.map(inc, range(500), pure=False))
    ended = [one.ended for one in traced.trace.processes]
    assert ended == ["limit of 20.00 kiB"] * 3


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_joining_workers_take_part(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            async with Worker(s.address, nthreads=2) as joined:
                await c.compute(shuffled())
                assert runtime_of(joined).counters.snapshot()["sent_nbytes"]
                # It also leaves before the end.
        trace = traced.trace
        assert_messages_match(trace)
        assert [one.ended for one in trace.processes] == [""] * 4
        happened = [(one.name, one.detail) for one in trace.instants]
        assert happened == [("worker joined", joined.address), ("worker left", joined.address)]
        *others, newest = trace.processes
        assert all(one.joined_s == 0 and one.left_s is None for one in others)
        came, left = trace.instants
        assert newest.joined_s == pytest.approx(came.at_s, abs=0.01)
        assert newest.left_s == left.at_s
        nothing_is_left(s, *workers)


@gen_cluster(client=True, nthreads=[], config=ON, timeout=150)
async def test_a_killed_worker_is_shown_as_lost(c, s):
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Nanny(s.address, nthreads=1) as kept,
            Nanny(s.address, nthreads=1) as killed,
            dask_gpurt.trace(c, f"{folder}/1.json") as traced,
        ):
            await c.compute(shuffled())
            victim = killed.worker_address
            os.kill((await c.run(os.getpid))[victim], signal.SIGKILL)
            await async_poll_for(lambda: victim not in s.workers, timeout=60)
            await c.submit(inc, 1)
            stays = kept.worker_address
    trace = traced.trace
    ended = {one.address: one.ended for one in trace.processes}
    lost = [one for one in trace.instants if one.name in ("worker lost", "worker left")]
    # Its nanny starts another worker, which may join before or after the end.
    assert [(one.name, one.detail) for one in lost] == [("worker lost", victim)]
    assert ended.pop(victim) == "lost: it left without handing over its events"
    assert not [one for one in ended.values() if one.startswith("lost")]
    assert ended[stays] == ""
    # Dask's own times of its tasks are there.
    index = [one.address for one in trace.processes].index(victim)
    assert [task for task in trace.tasks if task.process == index]


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_a_restarted_shuffle_is_an_instant(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced, Worker(s.address) as leaves:
            shuffling = c.persist(shuffled())
            await async_poll_for(lambda: runtime_of(leaves)._runs, timeout=60)
            await leaves.close()
            await wait(shuffling)
    assert "shuffle restarts" in {one.name for one in traced.trace.instants}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3, config=ON)
async def test_broadcasts_are_in_a_lane_of_their_own(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            big = await c.scatter(bytes(8 << 20), workers=[workers[0].address])
            await c.replicate([big], n=3)
    sent = [one for one in traced.trace.work if one.path == "broadcast"]
    assert {one.lane for one in sent} == {"collective"}
    assert sum(one.nbytes for one in sent) >= 2 * (8 << 20)
    assert_received(traced.trace, sent)
    assert {one.peer for one in sent} <= {one.address for one in workers}


DESCRIBED = """
hosts:
- {name: one, addresses: [127.0.0.1], numa: [{name: n, memory: 1 GiB}]}
- {name: two, addresses: [127.0.0.2], numa: [{name: n, memory: 1 GiB}]}
links:
- {between: [one/n, two/n], kind: tcp, bandwidth: 1 GB/s, latency: 1 us}
"""


def test_described_links_are_in_the_trace(tmp_path, file):
    (tmp_path / "machines.yaml").write_text(DESCRIBED)
    config = ON | {"gpurt.topology.file": str(tmp_path / "machines.yaml")}

    @gen_cluster(client=True, nthreads=FOUR, config=config)
    async def test(c, s, *workers):
        async with dask_gpurt.trace(c, file) as traced:
            await c.submit(inc, 1)
        links = {(one.source, one.target): one.bandwidth for one in traced.trace.links}
        assert links == dict.fromkeys((("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")), 1e9)

    test()


@gen_cluster(client=True, nthreads=TWO, config=ON | {"gpurt.shuffle.transport": "comm"})
async def test_messages_sent_again_have_one_number(c, s, *workers):
    receive, n_lost = ExchangeRun.receive, []

    async def with_lost_answers(run, data):
        answer = await receive(run, data)
        if "header" in data and len(n_lost) < 3:
            n_lost.append(data["message"])
            raise OSError("the answer is lost")
        return answer

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExchangeRun, "receive", with_lost_answers)
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            await c.compute(shuffled())
    trace = traced.trace
    assert len(n_lost) == 3
    assert_messages_match(trace)
    numbers = Counter((one.peer, one.message) for one in trace.work if one.path == "receive")
    assert sum(numbers.values()) > len(numbers), "some came twice"


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_requests_of_strangers_are_refused(c, s, *workers):
    with tempfile.TemporaryDirectory() as folder:
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            trace, here = traced._id, workers[0].address
            bad = [
                ("gpurt_trace_stop", {"trace": "another"}),
                ("gpurt_trace_stop", {"trace": 1}),
                ("gpurt_trace_part", {"trace": trace, "number": 99, "offset": 0}),
                ("gpurt_trace_part", {"trace": trace, "number": 0, "offset": -1}),
                ("gpurt_trace_begun", {"trace": trace, "worker": here, "problem": 5}),
                (
                    "gpurt_trace_left",
                    {"trace": trace, "worker": here, "offset": 9, "part": b"x", "described": None},
                ),
                (
                    "gpurt_trace_left",
                    {"trace": trace, "worker": here, "offset": 0, "part": b"", "described": {}},
                ),
                (
                    "gpurt_trace_left",
                    {"trace": trace, "worker": "no", "offset": 0, "part": b"", "described": {}},
                ),
            ]
            for name, arguments in bad:
                with pytest.raises(ValueError, match=r"."):
                    await getattr(c.scheduler, name)(**arguments)
            await c.compute(shuffled())
    assert_messages_match(traced.trace)


@gen_cluster(client=True, nthreads=TWO, config=ON)
async def test_files_come_in_bounded_pieces(c, s, *workers):
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(traced_worker, "PART_NBYTES", 500)
        sizes: list[int] = []
        async with dask_gpurt.trace(c, f"{folder}/1.json") as traced:
            await c.compute(shuffled())
            collect = traced.collect
            traced.collect = lambda: collect(sizes.append)
        assert_messages_match(traced.trace)
        assert len(sizes) > 10 and part(0).size
