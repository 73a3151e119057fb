"""The demo's report files are valid JSON and HTML, and contain every query."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dask_gpurt.demo.report import html_page, write_html, write_json
from dask_gpurt.demo.results import DemoReport, Row, describe_machine, format_nbytes, verdict


@pytest.fixture
def report() -> DemoReport:
    rows = [
        Row("Q1", "pricing <summary> & more", "TPC-H", [2.0, 2.2, 2.1], [1.0, 1.1, 1.05], 4),
        Row("Q2", "slower one", "TPC-H", [1.0], [1.5], 100, True),
        Row("Q3", "the same", "TPC-H", [1.0], [1.01], 10, True),
        Row("planes", "failed", "flights", [], [], 0, False, "stock failed: <Error>"),
    ]
    rows[0].enabled_totals = {"sent_nbytes": 5_000_000, "spilled_nbytes": 0, "shuffles_gpurt": 2}
    return DemoReport(
        rows, describe_machine(), {"scale": "1"}, "2026-01-01T00:00:00+00:00", 12.0, 3
    )


def test_html_is_well_formed_with_a_row_and_a_bar_per_query(
    report: DemoReport, tmp_path: Path
) -> None:
    write_html(report, tmp_path / "report.html")
    page = ElementTree.parse(tmp_path / "report.html").getroot()
    assert [row.get("data-query") for row in page.iter("tr") if row.get("data-query")] == [
        row.name for row in report.rows
    ]
    bars = [bar.get("class") for bar in page.iter("rect")]
    assert bars == ["bar faster", "bar slower", "bar same"]
    widths = {
        len(list(row)) + sum(int(cell.get("colspan", "1")) - 1 for cell in row)
        for row in page.iter("tr")
    }
    assert len(widths) == 1


def test_html_report_loads_nothing_from_outside(report: DemoReport) -> None:
    page = html_page(report)
    for outside in ("http:", "https:", "src=", "<link", "<script", "@import", "url("):
        assert outside not in page


def test_html_report_without_counters_or_times_has_no_bars(report: DemoReport) -> None:
    report.rows = [Row("Q1", "nothing", "TPC-H")]
    page = ElementTree.fromstring(html_page(report))
    assert [row.get("data-query") for row in page.iter("tr") if row.get("data-query")] == ["Q1"]
    assert list(page.iter("rect")) == []


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.3, 7.0, 40.0, 1000.0])
def test_chart_stays_inside_its_frame(report: DemoReport, ratio: float) -> None:
    report.rows = [Row("Q1", "", "TPC-H", [ratio], [1.0])]
    page = ElementTree.fromstring(html_page(report))
    (bar,) = page.iter("rect")
    assert float(bar.get("x", "nan")) + float(bar.get("width", "nan")) <= 800.5


def test_json_holds_every_query_and_no_nan(report: DemoReport, tmp_path: Path) -> None:
    write_json(report, tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert [query["name"] for query in read["queries"]] == ["Q1", "Q2", "Q3", "planes"]
    assert read["queries"][0]["ratio"] == pytest.approx(2.0)
    assert read["queries"][3]["ratio"] is None
    assert read["agrees"] is False
    assert read["totals"]["stock_s"] == pytest.approx(4.1)
    assert read["machine"]["python"]


def test_verdict_follows_the_ratio() -> None:
    assert [verdict(ratio) for ratio in (1.2, 1.04, 0.96, 0.8, math.nan)] == [
        "faster",
        "same",
        "same",
        "slower",
        "none",
    ]


def test_overlapping_times_are_no_difference() -> None:
    assert Row("Q1", "", "TPC-H", [1.0, 2.0, 3.0], [1.1, 1.2, 1.3]).verdict == "same"
    assert Row("Q1", "", "TPC-H", [2.0, 2.1, 3.0], [1.1, 1.2, 2.3]).verdict == "faster"
    assert Row("Q1", "", "TPC-H", [1.0, 1.1], [2.0, 1.2]).verdict == "slower"
    assert Row("Q1", "", "TPC-H", [2.0], [2.2]).verdict == "same"
    assert Row("Q1", "", "TPC-H", [2.0], [3.0]).verdict == "slower"


def test_sizes_have_units() -> None:
    assert [format_nbytes(nbytes) for nbytes in (0, 999, 3_100_000, 2 * 10**12)] == [
        "0 B",
        "999 B",
        "3.1 MB",
        "2.0 TB",
    ]
