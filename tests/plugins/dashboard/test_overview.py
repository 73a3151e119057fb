"""The page's data is the sum of what workers report, of bounded size, and valid JSON."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.plugins.dashboard import overview as shaping
from dask_gpurt.plugins.dashboard.overview import GONE, MAX_SHUFFLES, matrix, overview
from dask_gpurt.shuffle.traffic import OTHERS
from tests.plugins.dashboard.seen import glance, link, run, shuffles, status, worker


def test_links_of_all_workers_are_listed_and_summed():
    others = ["tcp://b", OTHERS, "comm", 4, 1]
    glances = {
        "tcp://a": glance(links=[link("a", "b", "shared", 70), link("b", "a", "inputs", 5)]),
        "tcp://b": glance(links=[link("b", "a", "shared", 10), others]),
    }
    seen = overview(status(), [worker("a"), worker("b")], glances)
    assert seen["paths"] == {"shared": 80, "ucx": 0, "comm": 4, "inputs": 5}
    assert [(one["from"], one["to"], one["nbytes"]) for one in seen["links"]] == [
        ("tcp://a", "tcp://b", 70),
        ("tcp://b", "tcp://a", 10),
        ("tcp://b", "tcp://a", 5),
        ("tcp://b", OTHERS, 4),
    ]


def test_links_beyond_the_limit_are_one_entry(monkeypatch):
    monkeypatch.setattr(shaping, "MAX_LINKS", 2)
    links = [link("a", str(n), "shared", 10 - n) for n in range(5)]
    seen = overview(status(), [worker("a")], {"tcp://a": glance(links=links)})
    assert [(one["to"], one["nbytes"]) for one in seen["links"]] == [
        ("tcp://0", 10),
        ("tcp://1", 9),
        (OTHERS, 8 + 7 + 6),
    ]
    assert seen["paths"]["shared"] == 40


def test_a_workers_memory_is_split_into_tiers():
    levels = [
        {"name": "memory", "used_nbytes": 300},
        {"name": "device", "used_nbytes": 5_000},
        {"name": "compressed", "used_nbytes": 40},
        {"name": "disk", "used_nbytes": 900},
    ]
    one = glance(levels=levels, spilled_nbytes=800, shards_nbytes=200, shards_on_disk_nbytes=7)
    (seen,) = overview(status(), [worker("a")], {"tcp://a": one})["workers"]
    assert seen["tiers"] == {
        "memory": 300,
        "pinned": 0,
        "compressed": 40,
        "shards": 200,
        "other": 1_000 - 540,
        "disk": 800,
        "shards_on_disk": 7,
        "device": 5_000,
    }


def test_a_worker_with_dasks_store_has_dasks_figures():
    # Dask counts the shards as managed and as spilled, because the worker reports them so.
    one = glance(shards_nbytes=100, shards_on_disk_nbytes=20, unmanaged="no memory limit")
    seen = overview(status(), [worker("a"), worker("b")], {"tcp://a": one})["workers"]
    assert seen[0]["tiers"]["memory"] == 200
    assert seen[0]["tiers"]["disk"] == 30
    assert seen[0]["why_stocks_store"] == "no memory limit"
    assert not seen[1]["has_answered"]
    assert seen[1]["tiers"]["memory"] == 300


def test_ended_and_open_runs_are_merged():
    ended = {"tcp://a": [run("old", 1)], "tcp://b": [run("new", 2)]}
    still_open = {"tcp://a": [run("new", 2)]}
    glances = {"tcp://a": glance(open_runs=still_open["tcp://a"]), "tcp://b": glance()}
    seen = overview(status(shuffles=shuffles(ended, still_open)), [], glances)
    assert [(one["label"], one["is_open"], one["rows"]) for one in seen["shuffles"]] == [
        ("old", False, 10),
        ("new", True, 20),
    ]
    assert seen["codecs"]["raw_nbytes"] == 200 + 400


def test_an_open_run_is_listed_however_many_are_newer():
    ended = {"tcp://a": [run(f"new-{n}", n) for n in range(2, 2 + 2 * MAX_SHUFFLES)]}
    still_open = {"tcp://a": [run("old", 1)]}
    glances = {"tcp://a": glance(open_runs=still_open["tcp://a"])}
    shown = overview(status(shuffles=shuffles(ended, still_open)), [], glances)["shuffles"]
    assert len(shown) == MAX_SHUFFLES
    assert [one["is_open"] for one in shown] == [True] + [False] * (MAX_SHUFFLES - 1)
    assert shown[-1]["run"] == 1 + 2 * MAX_SHUFFLES


def test_a_second_run_of_a_shuffle_says_so():
    ended = {"tcp://a": [run("0123456789", n) for n in range(2 * MAX_SHUFFLES)]}
    shown = overview(status(shuffles=shuffles(ended)), [], {})["shuffles"]
    assert len(shown) == MAX_SHUFFLES
    assert [one["label"] for one in shown[:2]] == ["01234567", "01234567, run 2"]


def test_decisions_on_codecs_are_counted_and_the_largest_shown():
    def codecs(name, *sizes):
        largest = [
            {"section": name, "link": "tcp://c", "choice": "zstd", "nbytes": n} for n in sizes
        ]
        return glance(codecs={"choices": {"zstd": 2, name: 1}, "largest": largest})

    glances = {"tcp://a": codecs("x", *range(6)), "tcp://b": codecs("y", *range(10, 16))}
    found = overview(status(), [], glances)["codecs"]
    assert found["choices"] == {"zstd": 4, "x": 1, "y": 1}
    assert [one["nbytes"] for one in found["largest"]] == [15, 14, 13, 12, 11, 10, 5, 4]


def test_placement_is_shown_without_candidates():
    record = {"key": "x", "worker": "tcp://a", "candidates": [1, 2, 3]}
    summary = {"policy": "data-aware", "saved_s": math.inf, "last_differing": [record]}
    seen = overview(status(placement=summary), [], {})["placement"]
    assert seen["last_differing"] == [{"key": "x", "worker": "tcp://a"}]
    assert json.loads(json.dumps(seen, allow_nan=False)) == seen


def test_workers_are_sorted_as_people_count():
    names = ["10", "2", "gpu-b", "gpu-a", "1"]
    seen = overview(status(), map(worker, names), {})["workers"]
    assert [one["name"] for one in seen] == ["1", "2", "10", "gpu-a", "gpu-b"]


def seen_with(links, n_workers):
    glances = {"tcp://0": glance(links=[link(*one) for one in links])}
    return overview(status(), [worker(str(n)) for n in range(n_workers)], glances)


def test_a_cell_of_the_matrix_has_all_paths_of_its_pair():
    seen = seen_with([("0", "1", "shared", 30), ("0", "1", "inputs", 50)], 2)
    assert matrix(seen) == (
        ["0", "1"],
        [
            {
                "from": "0",
                "to": "1",
                "nbytes": 80,
                "messages": 2,
                "paths": {"inputs": 50, "shared": 30},
            }
        ],
    )


def test_workers_that_left_are_one_row():
    seen = seen_with([("0", "lost", "shared", 30), ("lost", "gone too", "shared", 1)], 1)
    names, cells = matrix(seen)
    assert names == ["0", GONE]
    assert [(one["from"], one["to"]) for one in cells] == [("0", GONE), (GONE, GONE)]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 220).map(str),
            st.integers(0, 220).map(str),
            st.sampled_from(["shared", "comm"]),
            st.integers(0, 10**9),
        ),
        max_size=60,
    )
)
def test_the_matrix_of_200_workers_is_small_and_complete(links):
    seen = seen_with(links, 200)
    names, cells = matrix(seen)
    assert len(names) <= 16 + (GONE in names)
    assert names[15] == "185 others"
    assert len(names) == len(set(names))
    assert {one[end] for one in cells for end in ("from", "to")} <= set(names)
    assert sum(one["nbytes"] for one in cells) == sum(nbytes for *_, nbytes in links)
    assert len({(one["from"], one["to"]) for one in cells}) == len(cells)
