"""Runs give every worker its share of a tree, and every queued task to exactly one worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.placement.runs import Runs, pays_to_take

WORKERS = ["a", "b", "c"]


def runs(n_leaves, gone=()):
    return Runs(n_leaves, lambda task: task not in gone)


def test_workers_get_shares_by_their_threads():
    tree = runs(12)
    assert tree.share("a", 1, 4) == 3
    tree.begin("a", range(3))
    assert tree.share("b", 2, 4) == 6
    tree.begin("b", range(3, 9))
    assert tree.share("c", 1, 4) == 3


def test_shares_that_do_not_divide_differ_by_one_at_most():
    tree, first = runs(32), 0
    shares = []
    for number in range(10):
        shares.append(tree.share(str(number), 1, 10))
        tree.begin(str(number), range(first, first + shares[-1]))
        first += shares[-1]
    assert sum(shares) == 32
    assert set(shares) == {3, 4}


def test_rest_is_shared_once_all_workers_had_a_run():
    tree = runs(8)
    for address in ("a", "b"):
        tree.share(address, 1, 2)
        assert tree.is_served(address)
    assert tree.share("a", 1, 2) == 4
    assert not tree.is_served("b")


def test_tasks_of_a_run_come_in_the_order_of_the_scheduler():
    tree = runs(4)
    tree.begin("a", "wxyz")
    for order, leaf in ((3.0, "x"), (1.0, "z"), (2.0, "w")):
        tree.wait(leaf, (order,), leaf.upper())
    assert [tree.next_task("a") for _ in range(4)] == ["Z", "W", "X", None]


def test_tasks_that_no_longer_wait_are_left_out():
    tree = runs(4, gone={"first", "free"})
    tree.begin("a", "wx")
    tree.wait("w", (1.0,), "first")
    tree.wait("x", (2.0,), "second")
    tree.wait("y", (3.0,), "free")
    assert tree.longest("b") == ("a", ["second"])
    assert tree.next_task("a") == "second"
    assert tree.first_unowned() is None
    assert tree.is_empty


def test_the_longest_run_is_found_among_tasks_that_wait():
    tree = runs(9, gone={0, 1, 2, 3, 4})
    tree.begin("b", range(6))
    tree.begin("c", range(6, 9))
    for number in range(9):
        tree.wait(number, (number,), number)
    assert tree.longest("a") == ("c", [6, 7, 8])
    assert tree.longest("c") == ("b", [5])
    alone = runs(3, gone={0, 1})
    alone.begin("b", [0, 1])
    alone.begin("c", [2])
    for number in range(3):
        alone.wait(number, (number,), number)
    assert alone.longest("a") == ("c", [2])


def test_a_new_run_takes_the_waiting_tasks_of_its_leaves():
    tree = runs(4)
    for order, leaf in enumerate("wxyz"):
        tree.wait(leaf, (order,), leaf.upper())
    assert tree.first_unowned() == "W"
    tree.begin("a", "wz")
    assert tree.first_unowned() == "X"
    assert [tree.next_task("a") for _ in range(3)] == ["W", "Z", None]
    assert tree.owner("z") == "a"
    assert tree.owner("y") is None


def test_a_worker_takes_the_later_half_of_a_run():
    tree = runs(5)
    tree.begin("a", "vwxyz")
    for order, leaf in enumerate("vwxyz"):
        tree.wait(leaf, (order,), leaf.upper())
    tree.take("a", "b")
    assert [tree.next_task("b") for _ in range(4)] == ["X", "Y", "Z", None]
    assert [tree.next_task("a") for _ in range(3)] == ["V", "W", None]
    assert (tree.owner("w"), tree.owner("x")) == ("a", "b")


def test_leaves_of_a_worker_that_left_have_no_owner():
    tree = runs(2)
    tree.share("a", 1, 2)
    tree.begin("a", "wx")
    tree.wait("w", (1.0,), "W")
    tree.remove_worker("a")
    assert tree.owner("x") is None
    assert not tree.is_served("a")
    assert tree.next_task("a") is None
    assert tree.first_unowned() == "W"


def test_a_later_graph_has_runs_of_its_own():
    tree = runs(8)
    for address, leaves in (("a", range(4)), ("b", range(4, 8))):
        assert tree.share(address, 1, 2) == 4
        tree.begin(address, leaves)
    assert tree.is_used_up and not tree.is_outgrown
    # Five leaves are gone, one is kept in memory, one is being made, and one waits for its worker.
    states = {3: "memory", 6: "processing", 7: "queued"}
    tree.renew(7, states.get)
    assert not tree.is_used_up
    assert [tree.owner(leaf) for leaf in (0, 3, 6, 7)] == [None, None, "b", "b"]
    assert tree.share("a", 1, 2) == 3


@given(
    st.lists(st.sampled_from(["wait", "begin", "take", "next", "remove"]), max_size=60), st.data()
)
def test_each_task_is_handed_out_once(steps, data):
    """This holds whatever workers do, and no task is lost."""
    tree, waiting, done = runs(20), set(), []
    for number, step in enumerate(steps):
        address = data.draw(st.sampled_from(WORKERS))
        if step == "wait":
            waiting.add(number)
            tree.wait(number % 20, (data.draw(st.integers(0, 9)),), number)
        elif step == "begin":
            leaves = range(20)[number % 20 :][: tree.share(address, 1, 3)]
            tree.begin(address, [one for one in leaves if tree.owner(one) is None])
        elif step == "take":
            found = tree.longest(address)
            if found is not None:
                tree.take(found[0], address)
        elif step == "remove":
            tree.remove_worker(address)
        else:
            done.append(tree.next_task(address))
    for address in WORKERS:
        tree.remove_worker(address)
    assert tree.is_empty == (waiting == set(done) - {None})
    while (task := tree.first_unowned()) is not None:
        tree.begin("a", [task % 20])
        while (found := tree.next_task("a")) is not None:
            done.append(found)
    assert sorted(one for one in done if one is not None) == sorted(waiting)


@pytest.mark.parametrize(
    ("n_ahead", "n_ahead_of_thief", "moved_s", "pays"),
    [(3, 1, 0.1, True), (3, 1, 2.0, False), (1, 1, 0.0, False), (0, 0, 0.0, False)],
)
def test_taking_pays_if_the_task_ends_sooner(n_ahead, n_ahead_of_thief, moved_s, pays):
    assert pays_to_take(n_ahead, 1, n_ahead_of_thief, 1, 1.0, moved_s) is pays


def test_two_threads_do_what_is_ahead_in_half_the_time():
    assert pays_to_take(4, 1, 2, 1, 1.0, 1.5)
    assert not pays_to_take(4, 2, 2, 1, 1.0, 1.5)
