"""Tests of the run statistics, and of their summary over workers."""

from __future__ import annotations

import itertools

import pytest

from dask_gpurt.shuffle.figures import ARRAY, PHASES, RunFigures, RunSum


def figures(run=1, began_s=10.0):
    return RunFigures("abc", run, "pandas.DataFrame", began_s)


def summarised(reports):
    """Return the summary of one run from the snapshot of each worker."""
    total = RunSum(next(iter(reports.values())))
    for worker, snapshot in reports.items():
        total.add(worker, snapshot)
    return total.summary()


def test_amounts_are_added_and_reported():
    one = figures()
    one.add(rows_in=10, local_nbytes=100)
    one.add(rows_in=5)
    one.spent("partition", 0.5)
    one.spent("partition", 0.25)
    one.sent("b", nbytes=1000, raw_nbytes=1000, wire_nbytes=400, seconds=2.0)
    one.sent("b", nbytes=1000, raw_nbytes=0, wire_nbytes=0, seconds=1.0)
    one.sent("c", nbytes=1500, raw_nbytes=0, wire_nbytes=0, seconds=9.0)
    said = one.snapshot({0: 7, 1: 2})
    assert said["rows_in"] == 15
    assert said["local_nbytes"] == 100
    assert (said["sent_nbytes"], said["messages"]) == (3500, 3)
    assert (said["raw_nbytes"], said["wire_nbytes"]) == (1000, 400)
    assert said["seconds"] == {**dict.fromkeys(PHASES, 0.0), "partition": 0.75, "send": 12.0}
    assert said["links"] == {"b": (2000, 3.0)}
    assert said["rows_owned"] == 9
    assert said["fullest"] == [("0", 7), ("1", 2)]


@pytest.mark.parametrize("wrong", [lambda f: f.add(rows=1), lambda f: f.spent("sleep", 1.0)])
def test_unknown_names_are_errors(wrong):
    with pytest.raises(KeyError):
        wrong(figures())


def test_workers_are_summed_and_the_busiest_link_is_named():
    a, b = figures(), figures(began_s=9.0)
    a.add(rows_in=10, local_nbytes=100)
    b.add(rows_in=30, local_nbytes=300)
    a.sent("b", nbytes=10, raw_nbytes=10, wire_nbytes=10, seconds=1.0)
    b.sent("a", nbytes=50, raw_nbytes=50, wire_nbytes=20, seconds=1.0)
    b.sent("c", nbytes=30, raw_nbytes=0, wire_nbytes=0, seconds=1.5)
    one = summarised({"a": a.snapshot({0: 10}), "b": b.snapshot({1: 20, 2: 10})})
    assert one["rows"] == 40
    assert one["nbytes"] == 490
    assert (one["sent_nbytes"], one["messages"]) == (90, 3)
    assert (one["raw_nbytes"], one["wire_nbytes"]) == (60, 30)
    assert one["seconds"]["send"] == 3.5
    assert one["busiest_link"] == ("b", "a", 50, 1.0)
    assert one["began_s"] == 9.0
    assert one["skew"] == pytest.approx(30 / 20)
    assert one["fullest"] == [("1", 20), ("0", 10), ("2", 10)]


def skewed(kind="pandas.DataFrame", **rows_of_worker):
    """Return the summary of a run whose workers own partitions of these sizes."""
    numbers = itertools.count()
    said = {
        worker: RunFigures("abc", 1, kind, 10.0).snapshot({next(numbers): n for n in rows})
        for worker, rows in rows_of_worker.items()
    }
    return summarised(said)


def test_a_partition_is_hot_if_it_alone_overloads_its_owner():
    """Report a worker that has a third more than the mean because of one key."""
    one = skewed(a=[120], b=[20] * 4, c=[20] * 4, d=[20] * 4)
    assert one["skew"] == pytest.approx(120 / 90)
    assert one["hot"] == [("0", 120)]
    assert one["mean_rows"] == pytest.approx(360 / 13)
    even = skewed(a=[96], b=[22] * 4, c=[22] * 4, d=[22] * 4)
    assert even["skew"] < 1.2
    assert (even["fullest"][0], even["hot"]) == (("0", 96), [])


def test_equally_full_partitions_are_not_hot():
    """Five equal partitions on four workers have skew, but no hot key."""
    one = skewed(a=[10, 10], b=[10], c=[10], d=[11])
    assert one["skew"] > 1.5
    assert one["hot"] == []


def test_full_partition_on_a_balanced_worker_is_not_hot():
    one = skewed(a=[10, 10, 10, 10], b=[20], c=[15], d=[15])
    assert one["skew"] == pytest.approx(40 / 22.5)
    assert one["fullest"][0] == ("4", 20)
    assert one["hot"] == []


def test_chunks_of_arrays_are_not_hot():
    rows = {"a": [120], "b": [20] * 4, "c": [20] * 4, "d": [20] * 4}
    assert skewed(**rows)["hot"] == [("0", 120)]
    assert skewed(kind=ARRAY, **rows)["hot"] == []


def test_workers_without_partitions_do_not_count_as_unloaded():
    """With more workers than partitions, the mean is over the workers that own one."""
    reports = {"a": figures().snapshot({0: 10}), "b": figures().snapshot({})}
    assert summarised(reports)["skew"] == 1.0


def test_run_without_rows_or_messages_is_summarised():
    one = summarised({"a": figures().snapshot({})})
    assert one["skew"] == 1.0
    assert (one["busiest_link"], one["hot"], one["mean_rows"]) == (None, [], 0.0)


def snapshots(n):
    """Return the snapshots of a run on `n` workers, no two of them alike."""
    found = {}
    for number in range(n):
        one = figures(began_s=10.0 + number)
        one.add(rows_in=number, local_nbytes=3 * number)
        one.spent("unpack", 0.5 * number)
        one.sent("peer", nbytes=7 * number, raw_nbytes=5, wire_nbytes=2, seconds=1.0)
        found[f"w{number}"] = one.snapshot({number: 10 + 9 * number})
    return found


@pytest.mark.parametrize("n_kept", range(6))
def test_snapshots_that_are_not_kept_count_once(n_kept):
    """A summary is the same, whether snapshots were added before or are given with the question."""
    said = snapshots(6)
    items = [*said.items()]
    total = RunSum(items[0][1])
    for worker, snapshot in items[:n_kept]:
        total.add(worker, snapshot)
    before = total.summary()
    assert total.summary(items[n_kept:]) == summarised(said)
    assert total.summary() == before


def test_seconds_of_overlapping_messages_count_once():
    one = figures()
    message = {"peer": "b", "nbytes": 10, "raw_nbytes": 10, "wire_nbytes": 5}
    for seconds, until_s in ((2.0, 3.0), (2.0, 4.0), (0.5, 3.5), (1.0, 9.0)):
        one.sent(**message, seconds=seconds, until_s=until_s)
    # A message in shared memory is not on its way to another host.
    one.sent("c", nbytes=10**6, raw_nbytes=0, wire_nbytes=0, seconds=5.0, until_s=20.0)
    assert one.snapshot({})["remote_s"] == pytest.approx(3.0 + 1.0)


def test_a_summary_has_the_figures_of_a_verdict():
    slow, fast = (RunFigures("abc", 1, "pandas.DataFrame", 10.0, n) for n in (1, 3))
    for one, unpack_s, seconds in ((slow, 4.0, 2.0), (fast, 6.0, 1.0)):
        one.add(partitions_in=2)
        one.spent("unpack", unpack_s)
        one.waited_for_disk(0.25)
        one.still_runs(lasted_s=2 * unpack_s, cpu_s=unpack_s)
        one.still_runs(lasted_s=1.0, cpu_s=0.5)
        one.sent("b", 10, 10, 8, seconds, seconds)
    rates = {"b": 5.0}
    said = {"a": slow.snapshot({0: 1}, rates.__getitem__), "b": fast.snapshot({1: 1, 2: 1})}
    one = summarised(said)
    assert (one["workers"], one["threads"], one["lasted_s"], one["cpu_s"]) == (2, 4, 12.0, 10.0)
    assert (one["partitions_in"], one["partitions_out"], one["disk_wait_s"]) == (4, 3, 0.5)
    assert one["most_unpack_s"] == 4.0
    assert one["longest_sender"] == ("a", 8, 2.0, 5.0)
