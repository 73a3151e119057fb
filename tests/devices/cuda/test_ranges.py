"""Profiler ranges are named by lane and phase, close in order, and cost nothing when unused."""

from __future__ import annotations

import asyncio
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from dask_gpurt.devices.cuda import ranges
from dask_gpurt.devices.cuda.ranges import (
    Ranges,
    listening_domain,
    process_range,
    range_,
    range_name,
)
from dask_gpurt.devices.ledger import Ledger
from dask_gpurt.tracing.nsight.nsys import lane_and_path


class FakeDomain:
    """A fake domain that records opened and closed ranges, by thread."""

    def __init__(self, name=None):
        self.name = name
        self.made = []
        self.events = []

    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        attributes = {"message": message, "color": color, "category": category}
        self.made.append(attributes)
        return attributes

    def push_range(self, attributes):
        self.events.append((threading.get_ident(), "push", attributes["message"]))

    def pop_range(self):
        self.events.append((threading.get_ident(), "pop", None))

    def start_range(self, attributes):
        self.events.append((threading.get_ident(), "start", attributes["message"]))
        return len(self.events)

    def end_range(self, number):
        self.events.append((threading.get_ident(), "end", number))

    def seen(self):
        return [(what, message) for _, what, message in self.events]


class FakeDummyDomain:
    """A fake of the object that `nvtx` returns without a listening profiler."""


def fake_nvtx(domain, *, enabled=True):
    module = types.ModuleType("nvtx")
    module.Domain = FakeDomain
    module.get_domain = lambda name: domain
    module.enabled = lambda: enabled
    return module


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Restore the state of a process that has opened no range."""
    monkeypatch.setattr(ranges, "_ranges", None)


def test_a_range_is_named_by_lane_and_phase(monkeypatch):
    domain = FakeDomain()
    monkeypatch.setitem(sys.modules, "nvtx", fake_nvtx(domain))
    with range_("communication", "pack"):
        assert domain.seen() == [("push", "communication: pack")]
        with range_("copy", "device to host"):
            pass
    assert domain.seen()[1:] == [("push", "copy: device to host"), ("pop", None), ("pop", None)]
    assert [made["category"] for made in domain.made] == ["communication", "copy"]


def test_a_range_of_the_process_may_be_left_by_its_thread(monkeypatch):
    domain = FakeDomain()
    monkeypatch.setitem(sys.modules, "nvtx", fake_nvtx(domain))

    async def send(path, first, second):
        with process_range("communication", path):
            first.set()
            await second.wait()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(send("send", *events), send("receive", events[1], events[0]))

    asyncio.run(both())
    assert domain.seen()[:2] == [
        ("start", "communication: send"),
        ("start", "communication: receive"),
    ]
    assert sorted(domain.seen()[2:]) == [("end", 1), ("end", 2)]


def test_the_ledger_and_its_lanes_open_ranges_of_their_names(monkeypatch):
    domain = FakeDomain()
    monkeypatch.setitem(sys.modules, "nvtx", fake_nvtx(domain))
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.timed("communication", "send", 1):
        raise KeyError
    with ledger.timed("disk", "a file: written"):
        pass
    opened = [message for what, message in domain.seen() if what == "start"]
    assert [what for what, _ in domain.seen()] == ["start", "end"] * 2
    # A reader of traces finds the lane and the path of each entry in the range.
    assert [lane_and_path(one) for one in opened] == [one[:2] for one in ledger.entries()]
    assert opened == [range_name(*one[:2]) for one in ledger.entries()]


def test_a_range_closes_on_an_error_and_propagates_it():
    domain = FakeDomain()
    with pytest.raises(KeyError), Ranges(domain).open("compute", "task"):
        raise KeyError
    assert domain.seen()[-1] == ("pop", None)


def test_name_of_a_range_is_made_once():
    domain = FakeDomain()
    opened = Ranges(domain)
    for _ in range(3):
        with opened.open("compute", "task"), opened.open("compute", "task"):
            pass
    assert len(domain.made) == 1
    assert [what for what, _ in domain.seen()] == ["push", "push", "pop", "pop"] * 3


def test_each_thread_closes_its_own_ranges():
    domain = FakeDomain()
    opened = Ranges(domain)
    both_open = threading.Barrier(2, timeout=60)

    def work():
        with opened.open("compute", "task"):
            both_open.wait()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work) for _ in range(2)]:
            future.result()
    by_thread: dict[int, list[str]] = {}
    for thread, what, _ in domain.events:
        by_thread.setdefault(thread, []).append(what)
    assert list(by_thread.values()) == [["push", "pop"]] * 2


@pytest.mark.parametrize(
    "module",
    [
        None,
        fake_nvtx(FakeDummyDomain()),
        fake_nvtx(FakeDomain(), enabled=False),
    ],
    ids=["no package", "no profiler", "disabled"],
)
def test_a_range_does_nothing_without_a_profiler(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "nvtx", module)
    assert listening_domain() is None
    with range_("compute", "task") as value:
        assert value is None
    with process_range("compute", "task") as value:
        assert value is None
    # The same object each time, so no allocation.
    assert process_range("compute", "task") is range_("copy", "read")
    assert range_("compute", "task") is range_("copy", "read")


def test_the_profiler_is_detected_once(monkeypatch):
    asked = []
    monkeypatch.setattr(ranges, "listening_domain", lambda: asked.append(1))
    for _ in range(5):
        with range_("compute", "task"):
            pass
    assert asked == [1]


def test_nvtx_is_not_imported_before_the_first_range():
    code = (
        "import sys, dask_gpurt.devices.cuda.ranges as ranges\n"
        "assert 'nvtx' not in sys.modules\n"
        "with ranges.range_('compute', 'task'): pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ------------------------------------------------------------------ the real package


def test_real_nvtx_without_a_profiler_has_no_domain():
    pytest.importorskip("nvtx")
    assert listening_domain() is None
    with range_("compute", "task"):
        pass


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_real_nvtx_with_a_profiler_gets_ranges(tmp_path):
    """A small profiler, loaded as real profilers are."""
    pytest.importorskip("nvtx")
    source, tool, out = (
        pathlib.Path(__file__).parents[1].joinpath("nvtx_tool.c"),
        "tool.so",
        "seen.txt",
    )
    build = ["cc", "-shared", "-fPIC", "-o", tmp_path / tool, source]
    subprocess.run(build, check=True, timeout=120)
    code = """
from dask_gpurt.devices.cuda.ranges import range_
for _ in range(2):
    with range_("communication", "pack"), range_("a lane without a colour", "copy"):
        pass
from dask_gpurt.devices.ledger import Ledger
with Ledger().timed("disk", "write"), Ledger().timed("disk", "read"):
    pass
"""
    environment = {
        **os.environ,
        "NVTX_INJECTION64_PATH": str(tmp_path / tool),
        "NVTX_TOOL_OUT": str(tmp_path / out),
    }
    environment.pop("NVTX_DISABLE", None)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
    once = ["push communication: pack", "push a lane without a colour: copy", "pop", "pop"]
    ledger = ["start 1 disk: write", "start 2 disk: read", "end 2", "end 1"]
    seen = (tmp_path / out).read_text().splitlines()
    assert seen == ["domain dask_gpurt", *once, *once, *ledger]
