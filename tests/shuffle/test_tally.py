"""A tally counts each worker once, stays bounded and validates its input."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt import metrics
from dask_gpurt.shuffle import tally
from dask_gpurt.shuffle.figures import RunFigures, summarised
from dask_gpurt.shuffle.tally import Tally, brief


def word(sent_nbytes: int, *runs: dict[str, Any]) -> dict[str, Any]:
    return {"counters": {"sent_nbytes": sent_nbytes}, "runs": list(runs)}


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


def test_runs_of_departed_workers_are_kept() -> None:
    kept = Tally()
    of_a, of_b = a_run(b=7, c=9), a_run(a=5)
    for name, run in (("a", of_a), ("b", of_b)):
        kept.begin(f"id-{name}", name)
        kept.take(f"id-{name}", word(0, run))
    assert kept.runs_without(["a", "b"]) == {}
    kept.leave("a")
    found = {**kept.runs_without(["b"]), "b": [of_b]}
    assert summarised(found) == summarised({"a": [of_a], "b": [of_b]})
    assert kept.runs_without([])["a"] == [brief(of_a)]
    assert kept.runs_without([])["a"][0]["links"] == {"c": (9, 0.5)}


def test_the_number_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MAX_RUNS", 3)
    monkeypatch.setattr(tally, "MAX_SNAPSHOTS", 5)
    kept = Tally()
    for worker in ("a", "b"):
        kept.begin(worker, worker)
    for number in range(5):
        kept.take("a", word(0, a_run(number=number)))
    assert [run["run"] for run in kept.runs_without([])["a"]] == [2, 3, 4]
    for number in range(3):
        kept.take("b", word(0, a_run(number=2 + number)))
    found = kept.runs_without([])
    assert [run["run"] for run in found["a"]] == [run["run"] for run in found["b"]] == [3, 4]


@pytest.mark.parametrize(
    "said",
    [
        None,
        7,
        {},
        {"counters": {}, "runs": 3},
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
    ],
)
def test_malformed_messages_change_nothing(said: Any) -> None:
    kept = Tally()
    kept.begin("a", "a")
    kept.take("a", word(5))
    with pytest.raises(ValueError):
        kept.take("a", said)
    assert kept.totals()["sent_nbytes"] == 5
    assert kept.runs_without([]) == {}


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
    assert "more" not in kept.runs_without([])["a"][0]
