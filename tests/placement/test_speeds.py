"""The slowness of a worker is estimated from ended tasks, and from tasks that take long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement import speeds as module
from dask_gpurt.placement.speeds import MAX_SLOWNESS, PAUSE_S, Speeds
from tests.placement.machines import deterministic


class Cluster:
    """Workers that end tasks one after the other, and a clock."""

    def __init__(self, *workers):
        self.speeds = Speeds()
        self.workers = workers
        self.now_s = 0.0

    def end(self, worker, seconds, group="g", *, is_idle=True):
        self.now_s += seconds
        self.speeds.ended(worker, group, seconds, self.now_s, is_idle=is_idle)

    def all_end(self, seconds, times=1, **kwargs):
        for _ in range(times):
            for worker in self.workers:
                self.end(worker, seconds, **kwargs)

    def slowness(self, worker, *groups):
        return self.speeds.slowness(worker, self.now_s, groups)


@pytest.fixture
def three():
    return Cluster("a", "b", "c")


def test_no_worker_is_slow_with_equal_durations(three):
    draw = random.Random(1)
    for _ in range(300):
        three.end(draw.choice("abc"), draw.uniform(0.9, 1.1))
    assert {three.speeds.learned(one) for one in "abc"} == {1.0}


def test_scattered_durations_make_no_worker_slow(three):
    draw = random.Random(1)
    for _ in range(300):
        three.end(draw.choice("abc"), draw.lognormvariate(0.0, 1.0))
    assert max(three.speeds.learned(one) for one in "abc") < 1.5


def test_one_task_raises_suspicion_and_few_confirm_it(three):
    three.all_end(1.0, 5)
    found = []
    for _ in range(8):
        three.end("a", 5.0)
        found.append(three.speeds.learned("a"))
    assert 1.5 < found[0] < found[1] < found[-1] < 5
    # The estimate is the weighted mean of the evidence, in which each earlier task has half the
    # weight of the next one. It is not the lowest slowness that the evidence allows.
    weights = [sum(0.5**n for n in range(times)) / 2 for times in (1, 3)]
    assert found[0] == pytest.approx(5 ** weights[0], rel=0.1)
    assert found[2] == pytest.approx(5 ** weights[1], rel=0.1)
    assert found[-1] == pytest.approx(5, rel=0.02)
    assert three.speeds.learned("b") == 1.0


def test_brief_pause_does_not_make_a_worker_slow(three):
    """Usual tasks take 3 ms. Then three tasks in a row end only after a pause."""
    three.all_end(0.003, 20, is_idle=False)
    for _ in range(3):
        three.now_s += PAUSE_S
        assert three.slowness("a", "g") == 1.0
        three.end("a", PAUSE_S / 3, is_idle=False)
        assert three.slowness("a", "g") == 1.0
        assert three.speeds.learned("a") == 1.0


def test_first_short_task_is_ignored(three):
    for worker in "bc":
        three.end(worker, 0.003)
        three.end(worker, 0.003)
    three.end("a", PAUSE_S / 2)
    assert three.speeds.learned("a") == 1.0


def test_short_tasks_need_more_samples(three):
    three.all_end(0.003, 20)
    n_tasks = 0
    while three.speeds.learned("a") < 2.0:
        three.end("a", 0.015)
        n_tasks += 1
    assert 3 < n_tasks < 30


def test_recovered_worker_is_no_longer_slow(three):
    three.all_end(1.0, 5)
    for _ in range(8):
        three.end("a", 5.0)
    for _ in range(4):
        three.end("a", 1.0)
    assert three.speeds.learned("a") == 1.0


def test_own_durations_do_not_count_as_those_of_others():
    """Otherwise a slow worker with most tasks of a group would determine the usual duration."""
    two = Cluster("a", "b")
    for _ in range(30):
        two.end("a", 5.0)
    for _ in range(3):
        two.end("b", 1.0)
    two.end("a", 5.0)
    assert two.speeds.learned("a") > 2


def test_durations_are_compared_within_a_group(three):
    """A worker that gets all of the long tasks is not slow."""
    three.all_end(10.0, 3, group="long")
    three.all_end(0.1, 3, group="short")
    for _ in range(20):
        three.end("a", 10.0, group="long")
        three.end("b", 0.1, group="short")
    assert three.speeds.learned("a") == 1.0


def test_group_with_few_samples_of_others_is_ignored(three):
    three.end("b", 0.1)
    three.end("c", 0.1)
    three.end("a", 10.0)
    assert three.speeds.learned("a") == 1.0


def test_long_running_task_counts_before_it_ends(three):
    three.all_end(1.0, 5, is_idle=False)
    three.end("a", 1.0, is_idle=False)
    assert three.slowness("a", "g") == 1.0
    three.now_s += 1.2
    assert three.slowness("a", "g") == 1.0
    three.now_s += 3.8
    assert 2 < three.slowness("a", "g") < 5
    # The next task leaves the estimate as before.
    three.end("a", 1.0)
    assert three.speeds.learned("a") == 1.0


def test_waiting_or_unknown_tasks_do_not_count_as_slow(three):
    three.all_end(1.0, 5, is_idle=False)
    three.now_s += 100.0
    assert three.slowness("a", "g", "unknown") == 1.0
    assert three.speeds.slowness("b", three.now_s, None) == 1.0
    three.now_s += 0.5
    assert three.slowness("b", "g") == 1.0


def test_idle_worker_does_not_count_as_slow(three):
    three.all_end(1.0, 5)
    three.now_s += 100.0
    assert three.slowness("a", "g") == 1.0
    three.now_s += 10.0
    assert three.slowness("a", "g") > 2


def test_forgotten_group_starts_again(monkeypatch, three):
    monkeypatch.setattr(module, "MAX_GROUPS", 1)
    for _ in range(20):
        three.end("a", 100.0)
    three.all_end(1.0, group="another")
    three.all_end(1.0, 20)
    assert three.speeds.learned("a") == 1.0


times = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from("gh"), st.floats(0, 1e6)), max_size=60
)


@deterministic
@given(times)
def test_slowness_is_bounded_and_deterministic(ended):
    found = []
    for _ in range(2):
        cluster = Cluster()
        for worker, group, seconds in ended:
            cluster.end(worker, seconds, group)
        found.append([cluster.slowness(one, "g") for one in "abcd"])
        cluster.now_s += 1e9
        found[-1] += [cluster.slowness(one, "g") for one in "abcd"]
    assert found[0] == found[1]
    assert all(1 <= one <= MAX_SLOWNESS for one in found[0])


def test_recorded_speeds_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_GROUPS", 5)
    monkeypatch.setattr(module, "MAX_OWN_GROUPS", 2)
    cluster = Cluster("a", "b")
    for i in range(100):
        cluster.all_end(1.0, group=f"g{i}")
    assert len(cluster.speeds._groups) == 5
    assert all(len(one.own) == 2 for one in cluster.speeds._records.values())
    cluster.speeds.forget("a")
    assert set(cluster.speeds._records) == {"b"}
