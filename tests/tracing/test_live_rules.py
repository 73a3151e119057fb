"""Each rule finds what it is for, and no rule finds anything in a healthy program."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dask_gpurt.metrics import SPENT
from dask_gpurt.tracing.live_facts import LiveFacts
from dask_gpurt.tracing.live_rules import RULES
from dask_gpurt.tracing.live_verdict import LEAST_S, LEAST_SHARE, bottlenecks, verdict_lines

GUIDE = Path(__file__).parents[2] / "docs/guides/slow-shuffle.md"


def run(**changes: Any) -> dict[str, Any]:
    """Return the summary of a healthy run of 10 s on four workers of two threads."""
    one = {
        "id": "0123456789abcdef",
        "run": 1,
        "kind": "pandas.DataFrame",
        "nbytes": 8 * 10**9,
        "sent_nbytes": 6 * 10**9,
        "raw_nbytes": 4 * 10**9,
        "wire_nbytes": 4 * 10**9,
        "messages": 800,
        "partitions_in": 64,
        "partitions_out": 64,
        "outputs": 64,
        "workers": 4,
        "threads": 8,
        "lasted_s": 10.0,
        "cpu_s": 70.0,
        "disk_wait_s": 0.0,
        "longest_sender": ("tcp://a", 10**9, 6.0, 5 * 10**9),
        "most_unpack_s": 3.1,
        "seconds": {
            "partition": 40.0,
            "held_back": 0.5,
            "send": 30.0,
            "receive": 10.0,
            "unpack": 24.0,
        },
        "skew": 1.05,
        "hot": [],
        "mean_rows": 10_000.0,
    }
    return {**one, **changes}


def spent(**changes: float) -> dict[str, float]:
    return {**dict.fromkeys(SPENT, 0.0), "task_s": 76.0, "cpu_s": 70.0, "noncpu_s": 6.0, **changes}


HEALTHY = LiveFacts(
    shuffles=[run()],
    runs={"gpurt": 1, "stock": 0},
    spent=spent(),
    busy_s={"tcp://a": 9.4, "tcp://b": 9.5, "tcp://c": 9.6, "tcp://d": 9.5},
    n_threads=8,
    n_cores=8,
    wall_s=11.0,
)

#: What a program with this cause looks like.
PLANTED = {
    "slow-link": replace(
        HEALTHY,
        shuffles=[run(longest_sender=("tcp://a", 10**9, 9.5, 125e6), lasted_s=30.0, cpu_s=40.0)],
    ),
    "small-messages": replace(
        HEALTHY,
        shuffles=[run(partitions_in=20_000, partitions_out=20_000, nbytes=10**9, lasted_s=60.0)],
        wall_s=61.0,
    ),
    "skew": replace(
        HEALTHY,
        shuffles=[run(skew=2.4, hot=[("7", 900_000)])],
        busy_s={"tcp://a": 24.0, "tcp://b": 6.0, "tcp://c": 6.0, "tcp://d": 6.0},
        wall_s=25.0,
    ),
    "spill": replace(
        HEALTHY, shuffles=[run(disk_wait_s=40.0)], spent=spent(written_nbytes=4e9, disk_s=8.0)
    ),
    "memory-wait": replace(HEALTHY, spent=spent(task_s=116.0, room_s=40.0)),
    "back-pressure": replace(
        HEALTHY, shuffles=[run(seconds={**run()["seconds"], "held_back": 40.0})]
    ),
    "slow-worker": replace(HEALTHY, slowness={"tcp://b": 1.6, "tcp://c": 4.0}),
    "processors": replace(HEALTHY, n_cores=32),
    "scheduler-bound": replace(HEALTHY, spent=spent(scheduler_s=26.0), wall_s=30.0),
    "restarts": replace(HEALTHY, shuffles=[run(outputs=9), run(run=2)], wall_s=21.0),
    "stock-shuffle": replace(
        HEALTHY,
        runs={"gpurt": 1, "stock": 2},
        fallbacks=[{"what": "shuffle of x", "why": "there is no adapter for it", "count": 2}],
    ),
    "no-shuffle": replace(HEALTHY, shuffles=[], runs={"gpurt": 0, "stock": 0}),
}
LINK = ("tcp://a", 10**9, 20.0, 60e6)
PLANTED["slow-link"] = replace(
    HEALTHY, shuffles=[run(longest_sender=LINK, lasted_s=22.0, cpu_s=64.0)], wall_s=23.0
)


def test_nothing_is_found_in_a_healthy_program() -> None:
    assert bottlenecks(HEALTHY) == []
    (line,) = verdict_lines([], HEALTHY)
    assert line.startswith("nothing stands out: 8 threads worked 86% of 11.0 s")
    assert verdict_lines([], LiveFacts(spent=spent(task_s=0.0))) == [
        "nothing stands out: no task has run"
    ]


@pytest.mark.parametrize("rule", RULES)
def test_each_cause_is_named_first(rule: str) -> None:
    found = bottlenecks(PLANTED[rule])
    assert [one.rule for one in found] == [rule]
    (one,) = found
    if one.saves_s is not None:
        assert LEAST_SHARE * PLANTED[rule].period_s <= one.saves_s <= PLANTED[rule].period_s
        assert f"{rule} (up to {one.saves_s:.1f} s): " in verdict_lines(found, HEALTHY)[0]
    # Two sentences with numbers, which a stranger can read.
    assert re.search(r"\d", one.evidence)
    assert one.advice.endswith(".")


def test_a_shuffle_that_is_computed_twice_has_not_restarted() -> None:
    assert bottlenecks(replace(HEALTHY, shuffles=[run(), run(run=2)], wall_s=21.0)) == []


def test_a_small_shuffle_may_be_skewed() -> None:
    uneven = PLANTED["skew"].busy_s
    small = run(run=2, id="another", nbytes=10**8, skew=2.4)
    assert bottlenecks(replace(HEALTHY, shuffles=[run(), small], busy_s=uneven)) == []
    large = run(run=2, id="another", nbytes=10**9, skew=2.4)
    (one,) = bottlenecks(replace(HEALTHY, shuffles=[run(), large], busy_s=uneven))
    assert one.evidence.startswith("the fullest worker of shuffle another[2] had 2.4 times")


def test_an_attempt_that_did_not_count_is_not_skewed() -> None:
    """Its figures lack those of the worker that left."""
    lost = run(skew=2.0, outputs=3, hot=[("7", 50_000)])
    found = bottlenecks(replace(PLANTED["skew"], shuffles=[lost, run(run=2)], wall_s=21.0))
    assert [one.rule for one in found] == ["restarts"]


def test_slow_peers_are_not_named_beside_their_cause() -> None:
    held = {**run()["seconds"], "held_back": 80.0}
    slow = run(longest_sender=LINK, lasted_s=22.0, cpu_s=64.0, seconds=held)
    assert [one.rule for one in bottlenecks(replace(HEALTHY, shuffles=[slow]))] == ["slow-link"]


@pytest.mark.parametrize("amounts", [{"scheduler_s": 15.0}, {"task_s": 150.0, "cpu_s": 150.0}])
def test_a_busy_scheduler_limits_only_idle_threads(amounts: Any) -> None:
    found = replace(HEALTHY, spent=spent(**{"scheduler_s": 26.0, **amounts}), wall_s=30.0)
    assert "scheduler-bound" not in [one.rule for one in bottlenecks(found)]


def test_tiny_partitions_are_named_without_the_scheduler() -> None:
    busy = spent(scheduler_s=55.0)
    assert [one.rule for one in bottlenecks(replace(PLANTED["small-messages"], spent=busy))] == [
        "small-messages"
    ]


@pytest.mark.parametrize("bandwidth", [0.0, 5e9])
def test_a_link_is_not_slow_unless_it_is_full(bandwidth: float) -> None:
    """Messages are on their way for long where receivers have no time for them."""
    busy = run(longest_sender=("tcp://a", 10**9, 10.0, bandwidth))
    assert bottlenecks(replace(HEALTHY, shuffles=[busy])) == []


def test_threads_that_wait_for_one_lock_are_found() -> None:
    facts = replace(
        HEALTHY,
        shuffles=[],
        spent=spent(task_s=80.0, cpu_s=10.5, noncpu_s=69.0),
        busy_s={"tcp://a": 10.0},
    )
    (one,) = bottlenecks(facts)
    assert (one.rule, one.saves_s) == ("processors", pytest.approx(8.625))
    assert "interpreter lock" in one.evidence
    # Threads that wait for files use less than one processor together.
    waiting = replace(facts, spent=spent(task_s=80.0, cpu_s=2.0, noncpu_s=78.0))
    assert bottlenecks(waiting) == []


def test_a_setting_that_turns_shuffles_off_is_named() -> None:
    (one,) = bottlenecks(replace(PLANTED["no-shuffle"], method="tasks"))
    assert one.setting == "dataframe.shuffle.method: p2p"
    assert verdict_lines([one], HEALTHY)[0].endswith("Set `dataframe.shuffle.method: p2p`.")


def test_at_most_three_are_shown_with_the_most_seconds_first() -> None:
    facts = replace(
        HEALTHY,
        shuffles=[run(outputs=0, partitions_out=0), run(run=2, skew=2.4, disk_wait_s=40.0)],
        busy_s=PLANTED["skew"].busy_s,
        spent=spent(room_s=24.0),
        fallbacks=PLANTED["stock-shuffle"].fallbacks,
        wall_s=40.0,
    )
    found = bottlenecks(facts)
    rules = [one.rule for one in found]
    assert rules == ["skew", "restarts", "spill", "memory-wait", "stock-shuffle"]
    assert len(verdict_lines(found, facts)) == 3


numbers = st.floats(0, 100, allow_nan=False)


@given(
    st.lists(
        st.builds(
            run,
            lasted_s=numbers,
            cpu_s=numbers,
            disk_wait_s=numbers,
            most_unpack_s=numbers,
            partitions_in=st.integers(0, 10**5),
            partitions_out=st.integers(0, 10**5),
            threads=st.integers(0, 64),
            workers=st.integers(0, 64),
            nbytes=st.integers(0, 10**12),
            run=st.integers(1, 3),
            skew=st.floats(1, 10),
            longest_sender=st.none()
            | st.tuples(st.just("tcp://a"), st.integers(1, 10**12), numbers.filter(bool), numbers),
            seconds=st.fixed_dictionaries(dict.fromkeys(run()["seconds"], numbers)),
        ),
        max_size=4,
    ),
    st.fixed_dictionaries(dict.fromkeys(SPENT, numbers)),
    st.none() | numbers,
)
def test_no_savings_exceed_the_period(shuffles: Any, amounts: Any, wall_s: float | None) -> None:
    facts = replace(HEALTHY, shuffles=shuffles, spent=amounts, wall_s=wall_s)
    for one in bottlenecks(facts):
        assert one.rule in RULES
        assert one.saves_s is None or one.saves_s >= LEAST_S
        assert one.saves_s is None or one.saves_s <= facts.period_s
    assert verdict_lines(bottlenecks(facts), facts)


def test_the_guide_explains_every_rule() -> None:
    headings = re.findall(r"^### `([a-z-]+)`$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == list(RULES)


@pytest.mark.parametrize(
    ("now", "setting"),
    [
        (None, "gpurt.shuffle.memory: 0.5"),
        (0.3, "gpurt.shuffle.memory: 0.5"),
        (0.5, ""),
        (0.8, ""),
        (4e9, ""),
    ],
)
def test_no_setting_is_advised_that_is_there(now: float | None, setting: str) -> None:
    (found,) = bottlenecks(replace(PLANTED["spill"], shuffle_memory=now))
    assert (found.rule, found.setting) == ("spill", setting)
