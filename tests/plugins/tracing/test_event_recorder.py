"""A recorder keeps its limits, counts what it drops, and survives a full disk."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from dask_gpurt.devices.ledger import Ledger, LedgerEntry
from dask_gpurt.plugins.tracing import event_recorder
from dask_gpurt.plugins.tracing.event_recorder import MOST_EVENTS_PER_S, EventRecorder
from dask_gpurt.tracing.records import KEY, RECORD_NBYTES, WORK, decode

ENTRY = LedgerEntry("communication", "send", 100, 1.0, 2.0, "tcp://a:1", "tcp", 1, 2)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def read(recorder):
    return decode(recorder.read(0, 1 << 30))


def test_entries_of_a_ledger_are_recorded(folder):
    recorder = EventRecorder(folder, 1 << 20, full_keys=False)
    ledger = Ledger(clock=lambda: 5.0)
    ledger.add(ENTRY)
    ledger.recorder = recorder.work
    with ledger.timed("codec", "encode", 7):
        pass
    ledger.add(ENTRY._replace(key=("x-0", 3)))
    ledger.recorder = None
    ledger.add(ENTRY)
    recorder.stop()
    texts, names, rows, problem = read(recorder)
    assert problem == ""
    work = rows[rows["kind"] == WORK]
    assert [texts[row["path"]] for row in work] == ["encode", "send"]
    assert {names[row["thread"]] for row in work} == {str(threading.get_ident())}
    (key,) = rows[rows["kind"] == KEY]
    assert texts[key["path"]] == "x" and key["key"] == work["key"][1]
    recorder.close()


def test_whole_keys_are_recorded_only_if_wanted(folder):
    recorder = EventRecorder(folder, 1 << 20, full_keys=True)
    recorder.work(ENTRY._replace(key=("secret-0", 3)))
    recorder.stop()
    assert "('secret-0', 3)" in read(recorder).texts
    recorder.close()


def test_ten_thousand_events_at_once_are_all_there(folder):
    recorder = EventRecorder(folder, 1 << 30, full_keys=False)
    for number in range(10_000):
        recorder.work(ENTRY._replace(message=number))
    recorder.stop()
    assert recorder.n_dropped == 0 and recorder.ended == ""
    assert list(read(recorder).records["message"]) == list(range(10_000))
    assert recorder.nbytes / recorder.n_events <= 60
    recorder.close()


def test_many_threads_lose_nothing(folder):
    recorder = EventRecorder(folder, 1 << 30, full_keys=False)

    def add():
        for _ in range(2_000):
            recorder.work(ENTRY)

    threads = [threading.Thread(target=add) for _ in range(5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    recorder.stop()
    assert recorder.n_dropped == 0 and len(read(recorder).records) == 10_000
    recorder.close()


def test_more_events_than_allowed_are_dropped_and_counted(folder, monkeypatch):
    is_writing, may_write = threading.Event(), threading.Event()
    pwrite = os.pwrite

    def held(*arguments):
        is_writing.set()
        assert may_write.wait(60)
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", held)
    recorder = EventRecorder(folder, 1 << 30, full_keys=False)
    recorder.work(ENTRY)
    assert is_writing.wait(60)
    # The thread takes nothing now.
    most = event_recorder._MOST_A_TURN
    assert most >= MOST_EVENTS_PER_S / 10
    for _ in range(most + 7):
        recorder.work(ENTRY)
    may_write.set()
    recorder.stop()
    assert recorder.n_dropped == 7
    assert len(read(recorder).records) == 1 + most
    recorder.close()


def test_the_recording_ends_at_its_limit(folder):
    recorder = EventRecorder(folder, 100 * RECORD_NBYTES, full_keys=False)
    for _ in range(1_000):
        recorder.work(ENTRY)
    recorder.stop()
    assert recorder.ended == "limit of 5.47 kiB"
    assert recorder.nbytes <= 100 * RECORD_NBYTES
    recorder.work(ENTRY)
    recorder.close()


def test_a_full_disk_ends_the_recording(folder, monkeypatch):
    pwrite = os.pwrite
    written = []

    def full(file, data, offset):
        written.append(len(data))
        if len(written) == 1:
            return pwrite(file, data, offset)
        # Some of a block still fits.
        if len(written) == 2:
            return pwrite(file, data[:50], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(event_recorder, "_MOST_IN_BLOCK", 10)
    recorder = EventRecorder(folder, 1 << 20, full_keys=False)
    for _ in range(30):
        recorder.work(ENTRY)
    recorder.stop()
    assert "No space left" in recorder.ended
    _, _, rows, problem = read(recorder)
    assert problem == "" and len(rows) > 0
    recorder.close()


def test_an_event_that_cannot_be_encoded_costs_no_other(folder):
    recorder = EventRecorder(folder, 1 << 20, full_keys=False)
    recorder.work(ENTRY)
    recorder.work(ENTRY._replace(nbytes="many"))
    recorder.add(lambda encoder: 1 / 0)
    recorder.work(ENTRY)
    recorder.stop()
    assert recorder.n_dropped == 2 and len(read(recorder).records) == 2
    recorder.close()


def test_a_folder_that_cannot_be_written_ends_the_recording(tmp_path):
    recorder = EventRecorder(str(tmp_path / "none"), 1 << 20, full_keys=False)
    recorder.work(ENTRY)
    recorder.stop()
    assert f"cannot write to {tmp_path}/none: No such file" in recorder.ended
    assert recorder.read(0, 100) == b""
    recorder.close()


def test_a_file_can_be_read_in_pieces_and_goes_at_the_end(folder):
    recorder = EventRecorder(folder, 1 << 20, full_keys=False)
    for _ in range(100):
        recorder.work(ENTRY)
    recorder.stop()
    data = b""
    while part := recorder.read(len(data), 1000):
        data += part
    assert len(decode(data).records) == 100
    recorder.close()
    recorder.close()
    assert recorder.read(0, 1000) == b""


def test_a_killed_process_leaves_no_file(folder):
    recorder = EventRecorder(folder, 1 << 20, full_keys=False)
    recorder.work(ENTRY)
    recorder.stop()
    assert recorder.read(0, 1000)
    assert os.listdir(folder) == [], "without a name, others cannot read it either"
    recorder.close()
