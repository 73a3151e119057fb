"""Tables of the page say what happened, and escape what comes from outside."""

from __future__ import annotations

import re
from html import unescape

from dask_gpurt.plugins.dashboard import tables
from dask_gpurt.plugins.dashboard.overview import overview
from tests.plugins.dashboard.seen import glance, link, run, shuffles, status, worker

EVIL = "<script>alert(1)</script>"


def words(html):
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def record(**changes):
    return {
        "key": "sum-1",
        "worker": "tcp://a",
        "stock_worker": "tcp://b",
        "saved_s": 0.5,
        "reason": "lowest cost",
        **changes,
    }


def placed(policy="data-aware", **changes):
    return {
        "policy": policy,
        "decisions": {"cost": 3, "stock": 7},
        "differ_from_stock": 2,
        "saved_s": 1.5,
        "last_differing": [record()],
        **changes,
    }


def test_the_headline_has_each_path_and_silent_workers():
    glances = {"tcp://a": glance(links=[link("a", "b", "shared", 2**20)])}
    seen = overview(status(), [worker("a"), worker("b")], glances)
    said = words(tables.headline(seen))
    assert said.startswith("1.00 MiB moved in the last 30 s shared memory: 1.00 MiB")
    assert said.endswith("No answer from 1 of 2 workers: b.")
    off = overview(status(active=False, reason="disabled"), [], {})
    assert words(tables.headline(off)) == "dask_gpurt is off disabled"


def test_shuffles_have_their_figures_and_fallbacks():
    fallbacks = [{"what": "array rechunk", "why": "no word from worker x", "count": 2}]
    seen = overview(
        status(
            shuffles=shuffles({"tcp://a": [run("0123456789")]}),
            runs={"gpurt": 1, "stock": 2},
            fallbacks=fallbacks,
        ),
        [],
        {},
    )
    said = words(tables.shuffles(seen))
    assert "01234567 ended pandas.DataFrame 10 400 B 300 B 200 B as 50 B 1.00 none" in said
    assert said.endswith("2 more ran on stock Dask: array rechunk, no word from worker x (2)")
    assert "No shuffle has run" in words(tables.shuffles(overview(status(), [], {})))


def test_placement_says_what_differs_and_what_it_saves():
    last = [record(), record(saved_s=None), record(saved_s=-0.1)]
    seen = overview(status(placement=placed(last_differing=last)), [worker("a"), worker("b")], {})
    said = words(tables.placement(seen))
    assert said.startswith("2 of 10 tasks went to another worker than stock Dask's choice. ")
    assert "Where costs were compared, this saves 1.5 s by estimate." in said
    assert said.endswith(
        "sum-1 a b 500.00 ms lowest cost sum-1 a b not estimated lowest cost"
        " sum-1 a b 0 s lowest cost"
    )
    seen = overview(status(placement=placed("stock")), [], {})
    assert words(tables.placement(seen)) == "Stock Dask placed all 10 tasks."
    assert "Placement is off" in words(tables.placement(overview(status(), [], {})))


def test_compression_says_why_there_was_none():
    assert "nothing to compress" in tables.codecs(overview(status(), [], {}))
    sent = status(shuffles=shuffles({"tcp://a": [run("x")]}))
    assert "Nothing was compressed" in tables.codecs(overview(sent, [], {}))
    decision = {
        "section": "price",
        "link": "tcp://b",
        "choice": "zstd",
        "nbytes": 9,
        "bandwidth": 1e6,
        "ratio": 2.0,
        "reason": "it pays",
    }
    one = glance(codecs={"choices": {"zstd": 1}, "largest": [decision]})
    said = words(tables.codecs(overview(sent, [worker("a"), worker("b")], {"tcp://a": one})))
    assert said.startswith("200 B of shuffle data went over connections as 50 B.")
    assert said.endswith("price a to b zstd 2.0 0.95 MiB/s it pays")


def test_texts_from_outside_are_escaped():
    evil = record(key=EVIL, worker=EVIL, stock_worker=EVIL, reason=EVIL)
    decision = {
        "section": EVIL,
        "link": EVIL,
        "choice": EVIL,
        "nbytes": 9,
        "bandwidth": None,
        "ratio": 2.0,
        "reason": EVIL,
    }
    one = glance(codecs={"choices": {EVIL: 1}, "largest": [decision]})
    seen = overview(
        status(
            shuffles=shuffles({"tcp://a": [run(EVIL, kind=EVIL)]}),
            runs={"gpurt": 1, "stock": 1},
            fallbacks=[{"what": EVIL, "why": EVIL, "count": 1}],
            placement=placed(last_differing=[evil]),
        ),
        [worker(EVIL)],
        {"tcp://a": one},
    )
    seen["shuffles"][0]["hot"] = [(EVIL, 1)]
    for shown in (tables.headline, tables.shuffles, tables.placement, tables.codecs):
        html = shown(seen)
        assert "<script" not in html
        assert "script" in html
