"""The log of placement decisions keeps recent decisions and counts all of them."""

from __future__ import annotations

from dask_gpurt.placement.cost import Cost
from dask_gpurt.placement.explanation import Record
from dask_gpurt.plugins.placement import decision_log
from dask_gpurt.plugins.placement.decision_log import PlacementLog


def record(key, worker="a", stock="b"):
    costs = {"a": Cost(0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0), "b": Cost(2.0, 1.0, *[0.0] * 5)}
    return Record(key, worker, "cost", stock, costs)


def test_all_decisions_are_counted_and_the_last_kept(monkeypatch):
    monkeypatch.setattr(decision_log, "MAX_RECORDS", 3)
    log = PlacementLog()
    for i in range(10):
        log.keep(*record(i, stock="b" if i % 2 else "a"))
    found = log.summary()
    assert found["decisions"]["cost"] == 10
    assert found["differ_from_stock"] == 5
    assert found["saved_s"] == 10
    assert found["last_differing"][0]["saved_s"] == 2
    assert [one["key"] for one in found["last_differing"]] == ["9", "7"]
    assert log.explain(6) is None
    assert log.explain(7)["stock_worker"] == "b"


def test_choice_without_costs_saves_nothing_that_is_known():
    log = PlacementLog()
    log.keep("x", "a", "siblings", "b")
    found = log.summary()
    assert found["differ_from_stock"] == 1
    assert found["saved_s"] == 0
    assert found["last_differing"][0]["saved_s"] is None


def test_last_decision_of_a_replaced_task_is_found():
    log = PlacementLog()
    log.keep(*record("x", worker="a"))
    log.keep(*record("x", worker="b"))
    assert log.explain("x")["worker"] == "b"
