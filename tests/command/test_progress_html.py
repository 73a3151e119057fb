"""The output of a notebook says what runs, how far it is, and at the end what has moved."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpurt.command import run_report
from dask_gpurt.command.live import progress_html
from dask_gpurt.command.live.live_progress import pause_s
from dask_gpurt.command.observe import ClusterRecord, summed
from dask_gpurt.plugins.dashboard.overview import overview
from tests.plugins.dashboard.seen import glance, run, shuffles, status, worker
from tests.plugins.dashboard.test_tables import EVIL, words


def progress(inputs_done: int, outputs_done: int, is_delivered: bool = False) -> dict[str, Any]:
    return {
        "inputs": 4,
        "inputs_done": inputs_done,
        "is_delivered": is_delivered,
        "outputs": 12,
        "outputs_done": outputs_done,
    }


@pytest.mark.parametrize(
    "found, name, share",
    [
        (progress(0, 0), "cut and send", "0%"),
        (progress(3, 0), "cut and send", "18%"),
        (progress(4, 0), "deliver", "25%"),
        (progress(4, 0, is_delivered=True), "assemble", "25%"),
        (progress(4, 11, is_delivered=True), "assemble", "93%"),
        (progress(4, 12), "end", "100%"),
        (None, "end", ""),
    ],
)
def test_phase_follows_from_the_tasks(found: Any, name: str, share: str) -> None:
    assert progress_html.phase(found) == (name, share)


def test_a_shuffle_without_tasks_has_no_share_to_divide_by() -> None:
    empty = {**progress(0, 0), "inputs": 0, "outputs": 0}
    assert progress_html.phase(empty) == ("end", "0%")


def seen(n_workers: int = 2, **changes: Any) -> dict[str, Any]:
    """Return the page's data with an open and an ended shuffle on the first worker."""
    workers = [worker(str(n), managed_nbytes=300 + n) for n in range(n_workers)]
    ended, still = [run("abcdefghij")], [run("0123456789", rows_owned=30, n_owned=4)]
    one = glance(open_runs=still, ended_runs=ended, shards_nbytes=100)
    summed_up = shuffles({"tcp://0": ended}, {"tcp://0": still})
    known = status(progress={"0123456789": progress(3, 0)}, shuffles=summed_up, **changes)
    return overview(known, workers, {"tcp://0": one})


def test_running_shuffles_have_phase_share_bytes_and_skew() -> None:
    said = words(progress_html.running(seen(), "3/8 tasks, 1 MiB moved"))
    assert said.startswith("dask_gpurt: 3/8 tasks, 1 MiB moved shuffle data phase done bytes")
    assert "01234567 pandas.DataFrame cut and send 18% 400 B 300 B 1.00" in said
    assert "abcdefgh" not in said
    assert "0 200 B values, 100 B shards of shuffles, 700 B other memory of the process" in said


def test_workers_beyond_the_limit_are_summed() -> None:
    said = words(progress_html.running(seen(n_workers=11), ""))
    # The three with the least on disk and in memory, each of which has 50 bytes on disk.
    assert "3 others" in said
    assert "150 B values on disk" in said
    assert said.count("values on disk") == progress_html.MAX_WORKERS + 1


def test_an_output_says_that_nothing_runs_or_may_run() -> None:
    idle = overview(status(), [worker("a")], {})
    assert "No shuffle is running." in progress_html.running(idle, "")
    assert words(progress_html.running({}, "0 B moved")) == "dask_gpurt: 0 B moved"
    off = progress_html.running({"active": False, "reason": EVIL}, "")
    assert "The runtime is off" in off
    assert "<script" not in off


def test_the_end_is_the_report_of_a_run() -> None:
    before, record = ClusterRecord("tcp://s"), ClusterRecord("tcp://s")
    fallback = {"what": "shuffle of x", "why": EVIL, "count": 2}
    for one, sent, fallbacks in ((before, 10, []), (record, 10, []), (record, 2058, [fallback])):
        one.absorb(status(totals={"sent_nbytes": sent}, fallbacks=fallbacks, ready=["tcp://a"]))
    report = run_report.as_dict(summed([(record, before)]), 2.25, 0, ["a note"])
    html = progress_html.final(report)
    said = words(html)
    assert said.startswith("dask_gpurt: 2.2 s moved between workers 2.00 kiB stayed on its worker")
    assert "shuffles 0 with dask_gpurt, 0 with stock Dask" in said
    assert "2 times" in said
    assert "a note" in said
    assert said.endswith(" ".join(report["verdict"]["text"]))
    assert "<script" not in html
    assert "  moved between workers  2.00 kiB\n" in run_report.as_text(report)


def test_slow_answers_are_asked_for_less_often() -> None:
    assert pause_s(0.0) == pause_s(0.1) == 0.5
    assert pause_s(3.0) == 12.0
