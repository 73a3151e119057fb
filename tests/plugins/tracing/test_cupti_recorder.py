"""Records of CUPTI become entries, and what CUPTI refuses is one warning. No GPU is needed."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from dask_gpurt.devices.ledger import LedgerEntry
from dask_gpurt.plugins.tracing.cupti_recorder import CuptiRecorder, entry_of

KERNEL, COPY, PEER_COPY, SET = 10, 1, 22, 2


def activity(kind, **fields):
    about = {"start": 2_000_000_000, "end": 2_500_000_000, "device_id": 1, "stream_id": 7}
    return types.SimpleNamespace(kind=kind, **{**about, **fields})


def test_a_kernel_has_its_name():
    assert entry_of(activity(KERNEL, name="join"), 100.0) == LedgerEntry(
        "GPU 1 stream 7", "join", 0, 102.0, 102.5
    )


@pytest.mark.parametrize(
    "kind, copy, source, target, path, way",
    [
        (COPY, 1, 1, 3, "host to device", "pageable"),
        (COPY, 1, 2, 3, "host to device", "pinned"),
        (COPY, 2, 3, 2, "device to host", "pinned"),
        (COPY, 2, 3, 1, "device to host", "pageable"),
        (COPY, 2, 3, 0, "device to host", ""),
        (COPY, 8, 3, 3, "device", ""),
        (PEER_COPY, 10, 3, 3, "device to device", ""),
        (COPY, 0, 0, 0, "copy", ""),
    ],
)
def test_a_copy_has_its_kind_and_its_way(kind, copy, source, target, path, way):
    found = entry_of(
        activity(kind, copy_kind=copy, src_kind=source, dst_kind=target, bytes=1 << 30), 0.0
    )
    assert (found.path, found.way, found.nbytes) == (path, way, 1 << 30)


def test_a_memset_has_its_bytes():
    assert entry_of(activity(SET, bytes=5), 0.0)[1:3] == ("memset", 5)


def test_other_kinds_and_lost_times_are_left_out():
    assert entry_of(activity(5), 0.0) is None
    assert entry_of(activity(KERNEL, name="a", start=0), 0.0) is None
    assert entry_of(activity(KERNEL, name="a", end=1), 0.0) is None


def test_real_records_have_these_fields_and_numbers():
    cupti = pytest.importorskip("cupti.cupti")
    numbers = (cupti.ActivityKind.CONCURRENT_KERNEL, cupti.ActivityKind.MEMCPY)
    assert tuple(map(int, numbers)) == (KERNEL, COPY)
    assert int(cupti.ActivityKind.MEMCPY2) == PEER_COPY
    assert int(cupti.ActivityKind.MEMSET) == SET
    record = cupti.ActivityMemcpy6()
    record.kind, record.start, record.end, record.bytes = cupti.ActivityKind.MEMCPY, 10, 20, 99
    record.copy_kind = cupti.ActivityMemcpyKind.HTOD
    record.src_kind = cupti.ActivityMemoryKind.PINNED
    record.dst_kind = cupti.ActivityMemoryKind.DEVICE
    found = entry_of(record, 0.0)
    assert (found.path, found.way, found.nbytes) == ("host to device", "pinned", 99)
    for name in ("ActivityKernel9", "ActivityMemcpyPtoP4", "ActivityMemset4"):
        kind = getattr(cupti, name)()
        assert all(hasattr(kind, field) for field in ("start", "end", "device_id", "stream_id"))


class FakeCupti(types.ModuleType):
    """A fake of `cupti.cupti` that calls back when it is flushed."""

    def __init__(self, error=None, refused=(KERNEL, COPY, PEER_COPY, SET)):
        super().__init__("cupti.cupti")
        self.error, self.refused = error, refused
        self.kinds = set()
        self.done = [activity(KERNEL, name="a"), activity(5), activity(SET, bytes=1)]

    def get_timestamp(self):
        return 0

    def activity_register_callbacks(self, requested, completed):
        assert requested() == (8 << 20, 0)
        self.completed = completed

    def activity_enable(self, kind):
        if self.error and kind in self.refused:
            raise self.error
        self.kinds.add(kind)

    def activity_disable(self, kind):
        self.kinds.remove(kind)

    def activity_flush_all(self, flag):
        self.completed(self.done)


def use(monkeypatch, fake):
    package = types.ModuleType("cupti")
    package.cupti = fake
    monkeypatch.setitem(sys.modules, "cupti", package)


def test_work_is_recorded_until_it_stops(monkeypatch):
    fake = FakeCupti()
    use(monkeypatch, fake)
    entries = []
    recorder = CuptiRecorder(entries.append, lambda: 100.0)
    assert recorder.start()
    assert fake.kinds == {KERNEL, COPY, PEER_COPY, SET}
    recorder.stop()
    assert fake.kinds == set()
    assert [(one.path, one.start_s) for one in entries] == [("a", 102.0), ("memset", 102.0)]
    recorder.stop()
    assert len(entries) == 2


@pytest.mark.parametrize(
    "error, why",
    [
        (
            RuntimeError("ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)"),
            "another profiler, such as nsys, already uses it in this process",
        ),
        (RuntimeError("CUDA driver is not found"), "CUDA driver is not found"),
    ],
)
def test_a_refusal_is_one_warning(monkeypatch, caplog, error, why):
    use(monkeypatch, FakeCupti(error))
    recorder = CuptiRecorder([].append, lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        assert not recorder.start()
        recorder.stop()
    assert [record.message for record in caplog.records] == [
        f"the trace has no kernels: CUPTI refuses ({why})"
    ]


def test_nothing_stays_on_if_one_kind_is_refused(monkeypatch):
    fake = FakeCupti(RuntimeError("this kind is not supported"), refused=(SET,))
    use(monkeypatch, fake)
    recorder = CuptiRecorder([].append, lambda: 0.0)
    assert not recorder.start()
    assert fake.kinds == set()


def test_a_missing_package_is_no_news(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupti", None)
    with caplog.at_level(logging.WARNING):
        assert not CuptiRecorder([].append, lambda: 0.0).start()
    assert not caplog.records


def test_a_broken_package_is_one_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
    with caplog.at_level(logging.WARNING):
        assert not CuptiRecorder([].append, lambda: 0.0).start()
    (record,) = caplog.records
    assert record.message.startswith("the trace has no kernels: cupti-python cannot be loaded")
