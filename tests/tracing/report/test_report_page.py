"""The page of a report is one well-formed document that loads nothing and escapes what it shows."""

from __future__ import annotations

import re
import xml.etree.ElementTree

import pytest

from dask_gpurt.tracing.events import Instant, TraceProcess
from dask_gpurt.tracing.lane_names import FETCH
from dask_gpurt.tracing.report.trace_report import report_of
from dask_gpurt.tracing.report.web.html_parts import MOST_ROWS
from dask_gpurt.tracing.report.web.report_page import report_page
from tests.tracing.made_traces import MB, MadeTrace, ModelledShuffle

HOSTILE = "<script>alert('x')</script>&\"\x00\x1b[31m\u202egnp.exe\ud800"


def parsed(page: str) -> xml.etree.ElementTree.Element:
    page.encode()  # a file can hold it
    return xml.etree.ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


def page_of(trace, name: str = "trace.json.gz") -> str:
    return report_page(report_of(trace), name)


def text_in(page: str) -> str:
    return " ".join(" ".join(parsed(page).itertext()).split())


def hostile_trace() -> MadeTrace:
    made = MadeTrace((HOSTILE, 0), (HOSTILE + "2", 1), ("b" * 500, 2))
    made.trace.processes = [
        TraceProcess(one.address, HOSTILE, one.host, n_threads=2, ended=HOSTILE)
        for one in made.trace.processes
    ]
    task = made.task(HOSTILE + "t" * 600, 0, 0.0, 0.0, 3.0)
    made.task(HOSTILE, 1, 3.0, 9.0, 11.0, (task,), 3.0, 8.0)
    made.work(
        1, FETCH, "fetch", 3.0, 8.0, nbytes=8 * MB, way=HOSTILE, task=1,
        peer=made.trace.processes[0].address,
    )  # fmt: skip
    made.work(0, HOSTILE, HOSTILE + " > disk", 1.0, 2.0, nbytes=MB)
    made.trace.instants = [Instant(0, HOSTILE + "restart", 1.0)]
    made.trace.about = {HOSTILE: {"a": [HOSTILE]}, "program": HOSTILE}
    return made


def many_processes(n: int) -> MadeTrace:
    made = MadeTrace(*((f"host{i // 8}", i) for i in range(n)))
    for i in range(n):
        made.task("work", i, 0.0, 0.0, 1.0 + i / n, thread=1)
        made.message(i, (i + 8) % n, 1.0, 1.5 + i / n, MB)
    return made


@pytest.mark.parametrize(
    "trace",
    [
        ModelledShuffle(rates={("host1", "host2"): 100 * MB}).trace(),
        hostile_trace().trace,
        many_processes(300).trace,
        MadeTrace(("a", 0)).trace,
        MadeTrace().trace,
    ],
    ids=["shuffle", "hostile names", "many processes", "one idle process", "empty"],
)
def test_the_page_is_well_formed_and_loads_nothing(trace):
    page = page_of(trace, HOSTILE)
    root = parsed(page)
    loading = {"script", "link", "img", "iframe", "object", "embed", "audio", "video", "base"}
    assert not {one.tag for one in root.iter()} & loading
    names = {name for one in root.iter() for name in one.attrib}
    assert not {name for name in names if name.startswith("on")} | names & {"href", "src"}
    assert "url(" not in page and "@import" not in page and "http://" not in page
    assert "https://" not in page
    (policy,) = (one for one in root.iter("meta") if "http-equiv" in one.attrib)
    assert policy.attrib["content"].startswith("default-src 'none'")


def test_names_from_the_trace_are_escaped():
    page = page_of(hostile_trace().trace, HOSTILE)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search("[\x00\x1b\u202e\ud800]", page)


def test_the_verdict_is_first_with_its_setting():
    text = text_in(page_of(ModelledShuffle(rate=50 * MB).trace()))
    wanted = [
        "computing",
        "slow-link",
        "gpurt.shuffle.compression: lz4",
        "Critical path",
        "Workers",
    ]
    places = [text.index(one) for one in wanted]
    assert places == sorted(places)
    assert "saves up to" in text


def test_each_bottleneck_has_an_anchor_of_its_rule():
    report = report_of(ModelledShuffle(rate=50 * MB).trace())
    root = parsed(report_page(report, "x"))
    anchors = [one.attrib["id"] for one in root.iter("li") if "id" in one.attrib]
    assert anchors == [one.rule for one in report.bottlenecks] != []


def test_of_many_processes_the_extremes_are_shown():
    page = page_of(many_processes(1000).trace)
    assert len(page) < 600_000
    text = text_in(page)
    assert "and 980 more" in text
    assert "976 more between them" in text
    assert "host124-999: 100 % busy" not in text
    tables = [len(list(one.iter("tr"))) for one in parsed(page).iter("tbody")]
    assert max(tables) == MOST_ROWS


def test_the_strip_of_the_path_covers_all_time():
    root = parsed(page_of(ModelledShuffle(weights={5: 25.0}).trace()))
    strip = next(one for one in root.iter("svg") if one.attrib["class"] == "strip")
    places = [(float(one.attrib["x"]), float(one.attrib["width"])) for one in strip.iter("rect")]
    assert places[0][0] == 0
    ends = [x + width for x, width in places]
    assert ends[-1] == pytest.approx(1000, abs=0.2)
    assert all(a == pytest.approx(b, abs=0.2) for a, (b, _) in zip(ends, places[1:], strict=False))


def test_strips_of_workers_have_the_busy_share():
    trace = ModelledShuffle(slowdown={2: 3.0}).trace()
    report = report_of(trace)
    root = parsed(report_page(report, "x"))
    strips = [one for one in root.iter("svg") if one.attrib["class"] == "use"]
    assert len(strips) == len(report.workers)
    for strip, worker in zip(strips, report.workers, strict=True):
        area = sum(
            float(one.attrib["width"]) * float(one.attrib["height"])
            for one in strip.iter("rect")
            if one.attrib["class"] == "computing"
        )
        assert area / 100_000 == pytest.approx(worker.busy_share, abs=0.02)


def test_sections_without_rows_say_so():
    text = text_in(page_of(MadeTrace(("a", 0)).trace))
    for said in ("Nothing moved.", "No task ran.", "No task waited for data.", "no task"):
        assert said in text


def test_what_the_trace_lacks_and_its_settings_are_shown():
    made = many_processes(40)
    made.trace.processes = [
        TraceProcess(one.address, one.name, one.host, n_dropped=7) for one in made.trace.processes
    ]
    made.trace.about = {"program": "my.py", "settings": {"gpurt.strict": False}}
    made.trace.began_utc_s = 1_700_000_000.0
    text = text_in(page_of(made.trace))
    assert "host0-0 dropped 7 events." in text and "and 20 more" in text
    assert "my.py" in text and '"gpurt.strict": false' in text
    assert "began 2023-11-14 22:13:20 UTC" in text
