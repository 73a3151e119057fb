"""Explanations of decisions are sorted, complete and claim only computed costs."""

from __future__ import annotations

import json
import pathlib

from dask_gpurt.placement.cost import Cost
from dask_gpurt.placement.explanation import REASONS, Record, explained

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "concepts" / "placement.md"


def term(queue_s, transfer_s):
    return Cost(transfer_s, transfer_s, 0.0, queue_s, 1.0, 0.0, 0.0)


def test_candidates_are_sorted_and_their_terms_add_up():
    record = Record(("x", 1), "b", "cost", "a", {"a": term(5.0, 0.0), "b": term(1.0, 0.5)})
    assert record.differs
    assert record.saved_s == 3.0
    said = explained(record)
    assert json.loads(json.dumps(said)) == said
    assert said["key"] == "('x', 1)"
    assert (said["worker"], said["stock_worker"]) == ("b", "a")
    assert [one["worker"] for one in said["candidates"]] == ["b", "a"]
    for one in said["candidates"]:
        terms = {name: n for name, n in one.items() if name not in ("worker", "total_s")}
        assert one["total_s"] == sum(terms.values())


def test_record_claims_no_savings_without_costs():
    assert not Record("x", "a", "holder", None, {}).differs
    assert Record("x", "a", "siblings", "b", {}).saved_s is None
    assert Record("x", "a", "cost", "b", {"a": term(1.0, 0.0)}).saved_s is None
    assert Record("x", "a", "holder", None, {"a": term(1.0, 0.0)}).saved_s is None
    assert Record("x", "a", "small", "a", {}).saved_s == 0
    assert Record("x", "a", "cost", "a", {"a": term(1.0, 0.0)}).saved_s == 0


def test_the_page_about_placement_has_each_reason():
    page = PAGE.read_text()
    for code, meaning in REASONS.items():
        assert f"`{code}`" in page
        assert f"`{meaning}`" in page
