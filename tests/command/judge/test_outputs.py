"""Outputs of two runs are compared as a reader would compare them."""

from __future__ import annotations

import pytest

from dask_gpurt.command.judge.outputs import (
    ALIKE,
    DIFFERENT,
    EQUAL,
    MAX_LINES,
    REORDERED,
    ROUNDED,
    difference,
)


@pytest.mark.parametrize(
    "stock, enabled, kind",
    [
        ("", "", EQUAL),
        ("a 1\n", "a 1\n", EQUAL),
        ("took 1.25 s\n", "took 0.5 s\n", ALIKE),
        ("took 812ms, 3.1 GB/s", "took 97ms, 8 GB/s", ALIKE),
        ("tcp://10.0.0.1:4000 is up", "tls://10.0.0.1:54321 is up", ALIKE),
        ("<Client: 'tcp://a:1' processes=2>", "<Client: 'tcp://b:22' processes=2>", ALIKE),
        ("2026-11-27 06:34:25,123 INFO", "2026-11-27 06:34:29,001 INFO", ALIKE),
        ("0:00:12.5 done", "0:00:03.1 done", ALIKE),
        ("object at 0x7f01", "object at 0x7f99", ALIKE),
        ("key sum-0123456789abcdef0123456789abcdef", "key sum-" + "f9" * 16, ALIKE),
        ("sum 0.30000000000000004", "sum 0.3", ROUNDED),
        ("1.0  x\n2.5 y", "1.0 x\n2.5000000001 y", ROUNDED),
        ("sum 1e+20", "sum 1.0000000000000002e+20", ROUNDED),
        ("mean 0.0", "mean 5.551115123125783e-17", ROUNDED),
        ("mean -1e-17", "mean 3.4e-18", ROUNDED),
        ("a\nb\n", "b\na\n", REORDERED),
        ("sum 0.3", "sum 0.31", DIFFERENT),
        ("n 100", "n 101", DIFFERENT),
        ("sum 1.2345678901234e+20", "sum 1.9876543210987e+20", DIFFERENT),
        ("sum 12345678901234e+20", "sum 98765432109876e+20", DIFFERENT),
        ("p 0.0", "p 1e-9", DIFFERENT),
        ("a\n", "a\nb\n", DIFFERENT),
        ("10000000000", "10000000001", DIFFERENT),
        ("faces 1", "facade 1", DIFFERENT),
        ("std 1.290994\nmin 1.0", "std 777.00\nmin 1.0", DIFFERENT),
    ],
)
def test_the_kind_of_difference_is_named(stock: str, enabled: str, kind: str) -> None:
    for one, other in ((stock, enabled), (enabled, stock)):
        found = difference(one, other)
        assert found.kind == kind
        assert bool(found.diff) == (kind == DIFFERENT)


def test_a_diff_has_the_lines_and_is_bounded() -> None:
    found = difference("a\nx\nb\n", "a\ny\nb\n")
    assert {"-x", "+y"} <= {*found.diff}
    assert found.diff[0] == "--- stock Dask"
    long = difference("\n".join(map(str, range(500))), "w" * 10**6)
    assert len(long.diff) == MAX_LINES + 1
    assert max(map(len, long.diff)) < 200
    assert long.diff[-1].endswith(" more lines")
