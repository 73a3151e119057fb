"""A tally counts each worker once, stays bounded and validates its input."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt import metrics
from dask_gpurt.shuffle import tally
from dask_gpurt.shuffle.figures import RunFigures
from dask_gpurt.shuffle.tally import Tally


def word(
    sent_nbytes: int, *runs: dict[str, Any], still_open: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    found = {"counters": {"sent_nbytes": sent_nbytes}, "runs": list(runs)}
    return found if still_open is None else {**found, "open_runs": still_open}


def a_run(name: str = "shuffle", number: int = 1, **sent: int) -> dict[str, Any]:
    figures = RunFigures(name, number, "frame", 12.5)
    figures.add(rows_in=10)
    for peer, nbytes in sent.items():
        figures.sent(peer, nbytes, nbytes, nbytes, 0.5)
    return figures.snapshot({0: 4, 1: 6})


def test_last_report_of_each_worker_counts() -> None:
    kept = Tally()
    kept.begin("id-a", "tcp://a")
    kept.begin("id-b", "tcp://b")
    for sent in (3, 8, 5):  # a later message arrived before the last one
        kept.take("id-a", word(sent))
    kept.take("id-b", word(2))
    assert kept.totals() == {**metrics.total([]), "sent_nbytes": 10}
    assert kept.departed() == {"workers": 0, "totals": metrics.total([])}


def test_a_departed_worker_counts_once_despite_late_messages() -> None:
    kept = Tally()
    kept.begin("id-a", "tcp://a")
    kept.take("id-a", word(3))
    kept.leave("tcp://a")
    kept.take("id-a", word(4))
    # Another worker at the same address.
    kept.begin("id-b", "tcp://a")
    kept.take("id-b", word(10))
    assert kept.totals()["sent_nbytes"] == 14
    assert kept.departed()["workers"] == 1
    assert kept.departed()["totals"]["sent_nbytes"] == 4


def test_sum_of_long_departed_workers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_DEPARTED", 3)
    kept = Tally()
    for number in range(10):
        kept.begin(f"id-{number}", f"tcp://{number}")
        kept.take(f"id-{number}", word(1))
        kept.leave(f"tcp://{number}")
    kept.take("id-0", word(100))  # too late
    assert kept.totals()["sent_nbytes"] == 10
    assert kept.departed()["workers"] == 10
    assert kept.departed()["totals"]["sent_nbytes"] == 10
    assert len(kept._counters) == len(kept._address_of) == 3


def test_runs_are_added_up_and_outlive_their_workers() -> None:
    kept = Tally()
    for name, run in (("a", a_run(b=7, c=9)), ("b", a_run(a=5))):
        kept.begin(f"id-{name}", name)
        kept.take(f"id-{name}", word(0, run))
    (before,) = kept.shuffles()
    assert (before["rows"], before["sent_nbytes"]) == (20, 21)
    assert before["busiest_link"] == ("a", "c", 9, 0.5)
    kept.leave("a")
    assert kept.shuffles() == [before]


def test_a_run_told_several_times_counts_once() -> None:
    """A worker tells a run with two heartbeats, and once more as it leaves."""
    kept = Tally()
    kept.begin("a", "a")
    for _ in range(3):
        kept.take("a", word(0, a_run(b=7)))
    # An answer from before the end of the run arrives late.
    kept.take("a", word(0, still_open=[a_run(b=2)]))
    assert [one["sent_nbytes"] for one in kept.shuffles()] == [7]


def test_the_last_snapshot_of_an_open_run_counts() -> None:
    kept = Tally()
    for worker, sent in (("a", 2), ("b", 10), ("a", 3)):
        kept.begin(worker, worker)
        kept.take(worker, word(0, still_open=[a_run(c=sent)]))
    assert [one["sent_nbytes"] for one in kept.shuffles()] == [13]
    kept.take("a", word(0, a_run(c=5)))
    kept.leave("b")
    assert [one["sent_nbytes"] for one in kept.shuffles()] == [15]


def test_runs_are_listed_in_order_though_the_clock_was_set_back() -> None:
    kept = Tally()
    kept.begin("a", "a")
    first = {**a_run(number=1), "began_s": 20.0}
    kept.take("a", word(0, a_run(number=2), first))
    assert [one["run"] for one in kept.shuffles()] == [1, 2]


def numbers(kept: Tally) -> list[int]:
    return [one["run"] for one in kept.shuffles()]


def test_the_number_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_RUNS", 3)
    monkeypatch.setattr(tally, "MAX_SNAPSHOTS", 5)
    kept = Tally()
    for worker in ("a", "b"):
        kept.begin(worker, worker)
    for number in range(5):
        kept.take("a", word(0, a_run(number=number)))
    assert numbers(kept) == [2, 3, 4]
    for number in range(3):
        kept.take("b", word(0, a_run(number=2 + number)))
    assert numbers(kept) == [3, 4]
    # A dropped run does not come back with a part of its snapshots.
    kept.take("b", word(0, *[a_run(number=number) for number in range(5)]))
    assert numbers(kept) == [3, 4]
    assert [one["rows"] for one in kept.shuffles()] == [20, 20]


def test_a_run_is_kept_while_a_present_worker_has_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_RUNS", 3)
    kept = Tally()
    for worker in ("a", "b"):
        kept.begin(worker, worker)
    kept.take("a", word(0, still_open=[a_run(number=1)]))
    kept.take("b", word(0, *[a_run(number=number) for number in range(2, 7)]))
    assert numbers(kept) == [1, 5, 6]
    kept.leave("a")
    kept.take("b", word(0, a_run(number=7)))
    assert numbers(kept) == [5, 6, 7]


@pytest.mark.parametrize(
    "said",
    [
        None,
        7,
        {},
        {"counters": {}, "runs": 3},
        {"counters": {}, "runs": [], "open_runs": 3},
        {"counters": [], "runs": []},
        word(-1),
        word(2**63),
        word(True),
        word("9"),  # type: ignore[arg-type]
        word(1, {}),
        word(1, {**a_run(), "id": "x" * 300}),
        word(1, {**a_run(), "id": 3}),
        word(1, {**a_run(), "rows_in": -1}),
        word(1, {**a_run(), "began_s": float("nan")}),
        word(1, {**a_run(), "seconds": []}),
        word(1, {**a_run(), "links": {"a": 3}}),
        word(1, {**a_run(), "links": {"a": ("x", 1.0)}}),
        word(1, {**a_run(), "fullest": [(1, 2)]}),
        word(1, a_run(), {**a_run(number=2), "fullest": 3}),
        word(1, a_run(), still_open=[{}]),
    ],
)
def test_malformed_messages_change_nothing(said: Any) -> None:
    kept = Tally()
    kept.begin("a", "a")
    kept.take("a", word(5))
    with pytest.raises(ValueError):
        kept.take("a", said)
    assert kept.totals()["sent_nbytes"] == 5
    assert kept.shuffles() == []


@pytest.mark.parametrize("worker", [None, 3, [], "never-heard-of"])
def test_only_ready_workers_may_report(worker: Any) -> None:
    kept = Tally()
    kept.take(worker, word(5))
    assert kept.totals()["sent_nbytes"] == 0


def test_unknown_fields_of_a_report_are_dropped() -> None:
    kept = Tally()
    kept.begin("a", "a")
    kept.take("a", {"counters": {"sent_nbytes": 1, "more": 2}, "runs": [{**a_run(), "more": 3}]})
    assert "more" not in kept.totals()
    assert "more" not in kept.shuffles()[0]
