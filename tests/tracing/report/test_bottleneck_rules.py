"""Each rule names its cause first on a trace that has it, and no rule speaks of a healthy one."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest

from dask_gpurt.tracing.events import Instant, LinkFacts, Sample
from dask_gpurt.tracing.lane_names import PHASE
from dask_gpurt.tracing.report.rules.processor_rules import processors
from dask_gpurt.tracing.report.rules.task_rules import TASK_RULES
from dask_gpurt.tracing.report.rules.transfer_rules import TRANSFER_RULES
from dask_gpurt.tracing.report.task_stories import (
    CLIENT,
    COMPUTING,
    DISK,
    HELD,
    MEMORY,
    NETWORK,
    PEER,
    SCHEDULER,
    WORKER,
)
from dask_gpurt.tracing.report.trace_report import TraceReport, report_of
from tests.tracing.made_traces import MB, MadeTrace, ModelledShuffle

HOSTS = ("host1", "host2", "host3")


def four_workers() -> MadeTrace:
    return MadeTrace(("host1", 0), ("host1", 1), ("host2", 0), ("host2", 1))


def even_work(made: MadeTrace, until_s: float, from_s: float = 0.0, task_s: float = 1.0) -> None:
    """Keep all threads of all workers busy with tasks of one length."""
    for process, one in enumerate(made.trace.processes):
        for thread in range(one.n_threads):
            now_s = from_s
            while now_s < until_s:
                made.task("work", process, from_s, now_s, now_s + task_s, thread=thread)
                now_s += task_s


def slow_link() -> MadeTrace:
    model = ModelledShuffle(HOSTS, rates={("host1", "host2"): 100 * MB}, in_flight_nbytes=32 * MB)
    made = MadeTrace()
    made.trace = model.trace()
    made.trace.about = {"settings": {"gpurt.shuffle.compression": "none"}}
    return made


def slow_card() -> MadeTrace:
    made = MadeTrace()
    made.trace = ModelledShuffle(
        (*HOSTS, "host4"), into={"host4": 100 * MB}, in_flight_nbytes=32 * MB
    ).trace()
    return made


def network_bound() -> MadeTrace:
    made = MadeTrace()
    made.trace = ModelledShuffle(rate=100 * MB).trace()
    return made


def congested_link() -> MadeTrace:
    made = slow_link()
    # No other link carried anything from one host to another.
    used = ("tcp://host1", "tcp://host2")
    made.trace.work = [
        one
        for one in made.trace.work
        if not (
            one.path == "send"
            and made.trace.processes[one.process].host == "host2"
            and one.peer.startswith("tcp://host1")
        )
    ]
    made.trace.work = [
        one
        for one in made.trace.work
        if not one.peer
        or (
            made.trace.processes[one.process].address.startswith(used) and one.peer.startswith(used)
        )
    ]
    return made


def uncompressed() -> MadeTrace:
    made = four_workers()
    even_work(made, 8.0)
    last = made.task("shuffle-transfer", 0, 8.0, 8.0, 8.1)
    for receiver, sender in ((2, 0), (0, 2)):
        made.message(sender, receiver, 8.1, 9.4, 130 * MB)
    barrier = made.task("shuffle-barrier", 0, 8.1, 8.1, 9.4, (last,))
    made.task("shuffle-p2p", 0, 9.4, 9.4, 9.6, (barrier,))
    made.trace.about = {"settings": {"gpurt": {"shuffle": {"compression": "none"}}}}
    return made


def small_messages() -> MadeTrace:
    made = four_workers()
    even_work(made, 2.0)
    last = made.task("shuffle-transfer", 0, 2.0, 2.0, 2.1)
    for i in range(4000):
        made.message(0, 2, 2.1 + i * 0.0005, 2.1 + (i + 1) * 0.0005, 10_000)
    barrier = made.task("shuffle-barrier", 0, 2.1, 2.1, 4.1, (last,))
    for process in range(4):
        made.task("shuffle-p2p", process, 4.1, 4.1, 9.0, (barrier,))
        made.task("shuffle-p2p", process, 4.1, 4.1, 9.0, (barrier,))
    made.trace.about = {"gpurt.shuffle.compression": "lz4"}
    made.trace.links = [LinkFacts("host1", "host2", "tcp", 20 * MB)]
    return made


def back_pressure() -> MadeTrace:
    made = four_workers()
    made.task("shuffle-transfer", 0, 0.0, 0.0, 5.0)
    made.work(0, "phase", "held_back", 1.0, 5.0, task=0)
    made.message(0, 2, 1.0, 1.1, 8 * MB, answered_s=5.0)
    return made


def spill() -> MadeTrace:
    made = four_workers()
    even_work(made, 2.0)
    made.work(0, "spill", "shards > disk", 0.5, 2.0, nbytes=2000 * MB)
    for process in range(4):
        task = made.task("shuffle-p2p", process, 2.0, 2.0, 6.0)
        made.task("shuffle-p2p", process, 2.0, 2.0, 6.0)
        made.work(process, "read", "disk > shards", 2.5, 5.0, nbytes=2000 * MB, task=task)
        made.task("sum", process, 6.0, 6.0, 6.5, (task,))
    return made


def pageable() -> MadeTrace:
    made = MadeTrace(("gpu1", 0), threads=1)
    for i in range(10):
        made.task("kernel", 0, 0.0, float(i), i + 1.0, thread=1)
        made.work(0, "copies", "host > device", i, i + 0.6, nbytes=3000 * MB, way="pageable")
        made.work(0, "copies", "device > host", i + 0.6, i + 0.7, nbytes=2000 * MB, way="pinned")
    return made


def hot_key() -> MadeTrace:
    made = MadeTrace()
    made.trace = ModelledShuffle(weights={5: 25.0}).trace()
    return made


def full_worker() -> MadeTrace:
    made = four_workers()
    even_work(made, 2.0)
    for thread in range(2):
        for i in range(8):
            made.task("join", 3, 2.0, 2.0 + i, 3.0 + i, thread=thread)
    for process in range(3):
        made.task("join", process, 2.0, 2.0, 3.0, thread=0)
    return made


def slow_worker() -> MadeTrace:
    made = MadeTrace()
    made.trace = ModelledShuffle(slowdown={2: 3.0}).trace()
    return made


def few_partitions() -> MadeTrace:
    made = four_workers()
    for process in (0, 2):
        made.task("read-csv", process, 0.0, 0.0, 6.0, thread=0)
    even_work(made, 8.0, from_s=6.0, task_s=0.5)
    return made


def many_partitions() -> MadeTrace:
    made = four_workers()
    known_s = 0.0
    last: tuple[int, ...] = ()
    for i in range(400):
        start_s = known_s + 0.01
        known_s = start_s + 0.012
        last = (made.task("tiny", i % 4, start_s - 0.01, start_s, start_s + 0.004, last,
                          start_s - 0.001, start_s, known_s, 0),)  # fmt: skip
    return made


def busy_scheduler() -> MadeTrace:
    made = four_workers()
    last: tuple[int, ...] = ()
    for i in range(10):
        last = (made.task("step", i % 4, 2.0 * i, 2.0 * i + 1, 2.0 * i + 1.5, last,
                          2.0 * i + 1, None, 2.0 * i + 2, 0),)  # fmt: skip
    return made


def slow_client() -> MadeTrace:
    made = four_workers()
    even_work(made, 2.0)
    even_work(made, 8.0, from_s=6.0)
    return made


def serial_chain() -> MadeTrace:
    made = four_workers()
    last: tuple[int, ...] = ()
    for i in range(40):
        last = (made.task("iterate", i % 4, float(i), float(i), i + 1.0, last, thread=0),)
    return made


def chain_on_one_worker() -> MadeTrace:
    made = four_workers()
    last: tuple[int, ...] = ()
    for i in range(40):
        last = (made.task("iterate", 0, float(i), float(i), i + 1.0, last, thread=0),)
    return made


def waits_for_memory() -> MadeTrace:
    made = four_workers()
    even_work(made, 4.0)
    for process in range(4):
        for thread in range(2):
            made.task("merge", process, 4.0, 7.0, 9.0, thread=thread, here_s=4.0)
            made.work(process, PHASE, "memory-room", 4.0, 7.0)
    return made


def others_have_the_resource() -> MadeTrace:
    made = four_workers()
    even_work(made, 4.0)
    for process in range(4):
        made.task("train", process, 4.0, 7.0, 9.0, here_s=4.0)
    return made


def one_interpreter() -> MadeTrace:
    """Four threads of two workers run all the time, one at a time on each."""
    made = four_workers()
    even_work(made, 8.0)
    made.trace.samples = [Sample(i, "cpu", t / 2, 1.0) for t in range(17) for i in range(4)]
    return made


def full_hosts() -> MadeTrace:
    made = four_workers()
    even_work(made, 8.0)
    made.trace.samples = [Sample(i, "cpu", t / 2, 0.3) for t in range(17) for i in range(4)]
    return made


def restarted() -> MadeTrace:
    made = four_workers()
    even_work(made, 4.0)
    made.trace.instants = [Instant(0, "run restarted", 1.0), Instant(0, "worker lost", 0.9)]
    return made


PLANTED: dict[str, tuple[str, Callable[[], MadeTrace]]] = {
    "one slow link": ("slow-link", slow_link),
    "a slow card": ("slow-link", slow_card),
    "a slow network": ("slow-link", network_bound),
    "a link below its bandwidth": ("slow-link", congested_link),
    "no compression": ("compression", uncompressed),
    "small messages": ("small-messages", small_messages),
    "late answers": ("back-pressure", back_pressure),
    "spilled shards": ("spill", spill),
    "pageable copies": ("pageable-copies", pageable),
    "a hot key": ("skew", hot_key),
    "a full worker": ("skew", full_worker),
    "a slow worker": ("slow-worker", slow_worker),
    "few partitions": ("few-partitions", few_partitions),
    "tiny partitions": ("too-many-partitions", many_partitions),
    "a busy scheduler": ("scheduler-bound", busy_scheduler),
    "a slow client": ("client-bound", slow_client),
    "a chain of tasks": ("idle-threads", serial_chain),
    "a chain on one worker": ("idle-threads", chain_on_one_worker),
    "no memory": ("memory-wait", waits_for_memory),
    "one interpreter": ("processors", one_interpreter),
    "full hosts": ("processors", full_hosts),
    "a restart": ("restarts", restarted),
}

#: The parts of the critical path that a rule may save.
SAVES = {
    "slow-link": (NETWORK,),
    "compression": (NETWORK,),
    "small-messages": (NETWORK, PEER),
    "back-pressure": (PEER,),
    "spill": (DISK, MEMORY, PEER),
    "memory-wait": (MEMORY,),
    "scheduler-bound": (SCHEDULER,),
    "too-many-partitions": (SCHEDULER,),
    "client-bound": (CLIENT,),
    "processors": (COMPUTING, WORKER),
}


def planted(name: str) -> TraceReport:
    made = PLANTED[name][1]()
    made.trace.tasks.sort(key=lambda one: one.start_s)
    return report_of(made.trace)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(name):
    report = planted(name)
    assert [one.rule for one in report.bottlenecks][:1] == [PLANTED[name][0]], report.headline


@pytest.mark.parametrize("name", PLANTED)
def test_savings_are_at_most_what_the_path_spent(name):
    report = planted(name)
    for one in report.bottlenecks:
        kinds = SAVES.get(one.rule, (COMPUTING,))
        spent_s = sum(report.path.seconds(kind) for kind in kinds)
        assert (one.saves_s or 0.0) <= spent_s + 1e-9, one


@pytest.mark.parametrize("name", PLANTED)
def test_findings_are_sentences_with_numbers(name):
    for one in planted(name).bottlenecks:
        assert any(letter.isdigit() for letter in one.evidence)
        assert one.advice[0].isupper() and one.advice.endswith(".")
        assert not one.evidence.endswith(".")
        assert one.setting == "" or one.setting.startswith("gpurt.")


@pytest.mark.parametrize(
    "model",
    [
        ModelledShuffle(),
        ModelledShuffle(HOSTS, workers_of_host=4, n_inputs=240, n_outputs=240),
        ModelledShuffle(("host1",), n_inputs=40, n_outputs=40),
        ModelledShuffle(threads=1, weights={3: 1.5}, slowdown={1: 1.1}),
    ],
    ids=["two hosts", "twelve workers", "one host", "nearly even"],
)
def test_a_healthy_shuffle_has_no_bottleneck(model):
    report = report_of(model.trace())
    assert report.bottlenecks == []
    assert "Nothing stands out" in report.closing
    assert "more workers or threads would help" in report.closing


def test_busy_workers_have_no_bottleneck():
    made = four_workers()
    even_work(made, 6.0)
    made.trace.samples = [Sample(i, "cpu", t / 2, 1.9) for t in range(13) for i in range(4)]
    assert report_of(made.trace).bottlenecks == []


def test_an_empty_trace_has_no_bottleneck():
    assert report_of(MadeTrace().trace).bottlenecks == []


@pytest.mark.parametrize("about", [{}, {"settings": {"gpurt.shuffle.compression": "auto"}}])
def test_compression_is_proposed_only_where_it_is_off(about):
    made = uncompressed()
    made.trace.about = about
    assert "compression" not in [one.rule for one in report_of(made.trace).bottlenecks]


def test_memory_is_named_only_where_something_waited_for_it():
    report = report_of(others_have_the_resource().trace)
    assert report.path.seconds(MEMORY) == 0.0
    assert report.path.seconds(HELD) == pytest.approx(3.0)
    assert "memory-wait" not in [one.rule for one in report.bottlenecks]


def test_a_hot_key_does_not_make_a_worker_slow():
    report = planted("a hot key")
    assert max(row.slowness for row in report.workers) < 1.1


def test_a_slow_card_is_named_with_its_rate():
    report = planted("a slow card")
    assert report.bottlenecks[0].evidence.startswith("the link into host4 carried 100.0 MB/s")
    rows = {row.name: row for row in report.hosts}
    slow = rows.pop("into host4")
    assert slow.peers == HOSTS and slow.rate == pytest.approx(100 * MB, rel=0.05)
    into_others = [row.rate for row in rows.values() if row.direction == "into"]
    assert len(into_others) == 3 and min(into_others) > 500 * MB


def test_the_guide_explains_each_rule():
    guide = pathlib.Path(__file__).parents[3] / "docs" / "guides" / "read-a-trace.md"
    explained = re.findall(r"^#### (.+)$", guide.read_text(), re.MULTILINE)
    assert sorted(explained) == sorted({rule for rule, _ in PLANTED.values()})


def test_every_rule_is_planted():
    rules = (*TRANSFER_RULES, *TASK_RULES, processors)
    assert {rule.__name__.replace("_", "-") for rule in rules} == {
        rule for rule, _ in PLANTED.values()
    }


def test_ranks_follow_savings():
    found = planted("one slow link").bottlenecks
    saved = [one.saves_s for one in found]
    assert len(saved) > 1 and saved == sorted(saved, reverse=True)
