"""A status is a dict, and a notebook shows it as tables."""

from __future__ import annotations

import json
import pickle

from dask_gpurt.plugins.dashboard.status_html import RuntimeStatus
from tests.plugins.dashboard.seen import run, shuffles, status
from tests.plugins.dashboard.test_tables import EVIL, placed, words


def runtime_status(**changes):
    return RuntimeStatus(
        status(
            shuffles=shuffles({"tcp://a": [run("0123456789")]}),
            placement=placed(),
            workers={"tcp://a": {}, "tcp://b": None},
            totals={"sent_nbytes": 2**20, "messages": 1_234, "spilled_nbytes": 0},
            **changes,
        )
    )


def test_a_status_is_a_plain_mapping():
    one = runtime_status()
    assert isinstance(one, dict)
    assert one["active"] is True
    assert json.loads(json.dumps(one))["runs"] == {"gpurt": 1, "stock": 0}
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(one) == repr(dict(one))


def test_its_tables_have_the_figures():
    said = words(runtime_status(silent=["tcp://b"])._repr_html_())
    assert said.startswith(
        "dask_gpurt is on. Workers: 2. Shuffles: 1 on dask_gpurt, 0 on stock Dask. "
        "no answer from worker tcp://b"
    )
    assert "01234567 pandas.DataFrame 10 400 B" in said
    assert "2 of 10 tasks went to another worker" in said
    assert said.endswith("shuffle bytes sent to other workers 1.00 MiB shuffle messages sent 1,234")


def test_an_inactive_status_says_why():
    assert words(runtime_status(active=False, reason=EVIL)._repr_html_()) == (
        f"dask_gpurt is off {EVIL}"
    )
    assert "<script" not in runtime_status(active=False, reason=EVIL)._repr_html_()
    changed = runtime_status()
    del changed["runs"]
    assert "active" in changed._repr_html_()
