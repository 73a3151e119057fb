"""A report has a bounded size, and all counts in it are exact."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import thousand_reports
from benchmarks.thousand_reports import BUSIEST, N_RUNS, N_WORKERS, PEERS, ROWS
from dask_gpurt.plugins.worker_report import (
    MAX_GROUPS,
    MIN_ENTRIES,
    PEER_ENTRIES,
    RunReports,
    limited,
    most_entries,
    peers_by_path,
)
from dask_gpurt.shuffle.tally import MAX_RUNS


def links(*whys: str) -> dict[str, dict[str, Any]]:
    return {
        f"tcp://{number}": {"path": "comm", "why_not": {"ucx": why}, "bandwidth": None}
        for number, why in enumerate(whys)
    }


def test_the_more_workers_the_fewer_entries_has_each() -> None:
    assert most_entries(0) >= most_entries(1) > most_entries(10) > most_entries(100)
    assert most_entries(10**6) == MIN_ENTRIES


def test_peers_are_counted_by_path_and_reason() -> None:
    found = peers_by_path(links("a", "b", "a"))
    assert found == [
        {"path": "comm", "why_not": {"ucx": "a"}, "peers": 2},
        {"path": "comm", "why_not": {"ucx": "b"}, "peers": 1},
    ]


def test_peers_of_rare_reasons_are_counted_together() -> None:
    whys = [str(number) for number in range(MAX_GROUPS + 3)]
    found = peers_by_path(links(*whys))
    assert len(found) == MAX_GROUPS + 1
    assert found[-1] == {"path": "comm", "why_not": {}, "peers": 3}
    assert sum(one["peers"] for one in found) == len(whys)


def test_entries_beyond_the_limit_are_counted() -> None:
    decisions = [SimpleNamespace(nbytes=n, to_plain=lambda n=n: n) for n in range(5)]
    most = 2 * PEER_ENTRIES
    found = limited(links(*"aaaaaaaaaa"), decisions, most)
    assert len(found["links"]) == 2
    assert found["codecs"] == [4, 3]
    assert found["left_out"] == {"links": 8, "codecs": 3}
    whole = limited(links("a"), decisions[:1], most)
    assert whole["left_out"] == {"links": 0, "codecs": 0}


def test_a_lost_heartbeat_loses_no_run() -> None:
    reports = RunReports()
    reports.ended({"run": 1})
    lost = reports.for_heartbeat()
    reports.ended({"run": 2})
    assert lost == [{"run": 1}]
    assert reports.unsure() == [{"run": 1}, {"run": 2}]
    assert reports.for_heartbeat() == [{"run": 1}, {"run": 2}]
    assert reports.for_heartbeat() == [{"run": 2}]
    assert reports.for_heartbeat() == reports.unsure() == []
    assert reports.past() == [{"run": 1}, {"run": 2}]


def test_the_oldest_reports_are_dropped() -> None:
    reports = RunReports()
    for number in range(2 * MAX_RUNS):
        reports.ended({"run": number})
    assert [one["run"] for one in reports.past()] == [*range(MAX_RUNS, 2 * MAX_RUNS)]
    assert reports.for_heartbeat() == reports.past()
    reports.clear()
    assert reports.past() == reports.unsure() == []


@pytest.mark.parametrize("n_open", [0, 1, MIN_ENTRIES])
def test_a_thousand_reports_stay_small(n_open: int) -> None:
    """1,000 workers with 32 runs and 999 peers each, through Dask's serialisation."""
    found = asyncio.run(thousand_reports.status_of_all(n_open))
    assert found.reports_nbytes <= 2_000_000
    # The answer to the client has no more than the reports.
    assert found.answer_nbytes <= 1_000_000
    assert [one["run"] for one in found.shuffles] == [*range(1, N_RUNS + 1)]
    for one in found.shuffles:
        assert one["rows"] == N_WORKERS * ROWS
        sender, receiver, _, _ = one["busiest_link"]
        assert (sender, receiver) == (thousand_reports.address(BUSIEST), PEERS[-1])
    assert found.text.count(f"{len(PEERS)} by comm") == N_WORKERS
