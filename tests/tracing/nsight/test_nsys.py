"""Exports of Nsight Systems are read exactly, whichever tables and columns they have."""

from __future__ import annotations

import itertools
import os
import pathlib
import sqlite3
from collections import Counter

import pytest

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import DEVICE
from dask_gpurt.tracing.files import read, write
from dask_gpurt.tracing.nsight import nsys
from dask_gpurt.tracing.nsight.nsys import read_nsys
from tests.tracing.nsight.exports import (
    BEGAN_NS,
    OTHER_PID,
    PID,
    ROWS,
    TABLES,
    write_export,
)

KERNELS, COPIES, MEMSETS, RANGES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "NVTX_EVENTS",
)
#: Columns that an export may lack without losing an event.
OPTIONAL = [
    f"{table}.{column}"
    for table, columns in {
        KERNELS: "deviceId greenContextId streamId globalPid demangledName shortName mangledName",
        COPIES: "deviceId streamId globalPid bytes copyKind srcKind dstKind copyCount",
        MEMSETS: "deviceId streamId globalPid bytes memKind",
        RANGES: "end eventType text globalTid endGlobalTid textId domainId",
        "TARGET_INFO_GPU": "cuDevice name id",
        "TARGET_INFO_CUDA_DEVICE": "pid gpuId",
        "PROCESSES": "name globalPid",
        "StringIds": "value",
    }.items()
    for column in columns.split()
]
VARIANTS = [
    (),
    *((table,) for table in TABLES),
    *((column,) for column in OPTIONAL),
    *itertools.combinations(("StringIds", "PROCESSES", COPIES, RANGES, "TARGET_INFO_GPU"), 2),
    *itertools.combinations(("TARGET_INFO_GPU", "TARGET_INFO_CUDA_DEVICE", KERNELS, MEMSETS), 3),
    tuple(OPTIONAL),
    tuple(one for one in OPTIONAL if one.startswith(COPIES)),
    tuple(table for table in TABLES if not table.startswith("CUPTI")),
]


def busy_ns(trace, *paths):
    return round(sum(w.end_s - w.start_s for w in trace.work if w.path in paths) * 1e9)


def expected(without):
    """Return the exact sums of an export without some tables and columns."""

    def has(name):
        return name not in without

    def rows(table):
        return ROWS[table] if has(table) else []

    copies, kernels, sets = rows(COPIES), rows(KERNELS), rows(MEMSETS)
    lengths = [row["end"] - row["start"] for row in (*copies, *kernels, *sets)]
    return {
        "n": len(lengths),
        "busy_ns": sum(lengths),
        "nbytes": sum(row["bytes"] for row in copies if has(f"{COPIES}.bytes"))
        + sum(row["bytes"] for row in sets if has(f"{MEMSETS}.bytes")),
    }


@pytest.mark.parametrize("without", VARIANTS, ids=lambda one: " ".join(one[:3])[:60] or "all")
def test_a_variant_of_the_schema_is_read_exactly(tmp_path, without):
    trace = read_nsys(write_export(tmp_path / "a.sqlite", without))
    on_gpu = [work for work in trace.work if work.lane.startswith("stream")]
    assert {
        "n": len(on_gpu),
        "busy_ns": round(sum(work.end_s - work.start_s for work in on_gpu) * 1e9),
        "nbytes": sum(work.nbytes for work in on_gpu),
    } == expected(without)
    assert sum(n for _, _, n, _ in trace.about["kernels"]) == len(
        ROWS[KERNELS] if KERNELS not in without else []
    )
    assert all(process.kind == DEVICE for process in trace.processes)
    assert trace.work == sorted(trace.work, key=lambda work: work.start_s)
    # Whatever was read can be written.
    write(trace, tmp_path / "a.json")
    assert len(read(tmp_path / "a.json").work) == len(trace.work)


@pytest.fixture
def trace(tmp_path):
    return read_nsys(write_export(tmp_path / "a.sqlite"))


def test_copies_have_a_kind_and_a_way(trace):
    copies = [(w.path, w.way, w.nbytes) for w in trace.work if w.lane == "stream 13"]
    assert copies == [
        ("host to device", "pageable", 1 << 20),
        ("host to device", "pinned", 1 << 21),
        ("device to host", "pinned", 1 << 22),
        ("device", "", 1 << 23),
        ("device to device", "", 1 << 24),
        ("host to device", "managed", 1 << 25),
        ("device to host", "", 1 << 26),
        ("copy", "", 1 << 27),
    ]


def test_kernels_have_names_and_sums(trace):
    kernels = Counter((w.path, w.process) for w in trace.work if w.path in ("join", "scan"))
    assert sorted(kernels.values()) == [1, 1, 2]
    first, other = (f"nsys://node1/{pid}/0" for pid in (PID, OTHER_PID))
    assert trace.about["kernels"] == [
        [other, "scan", 1, 1000e-9],
        [first, "join", 2, 120e-9],
        [first, "scan", 1, 30e-9],
    ]


def test_a_gpu_has_its_name_for_each_program(trace):
    names = {process.address: process.name for process in trace.processes}
    # This program numbers the GPUs that it sees anew.
    assert names[f"nsys://node1/{PID}/0"] == f"H200 0 of python3 {PID}"
    assert names[f"nsys://node1/{OTHER_PID}/0"] == f"A100 0 of process {OTHER_PID}"
    assert {process.host for process in trace.processes} == {"node1"}
    assert set(trace.about["pids"].values()) == {PID, OTHER_PID}


def test_our_ranges_are_our_lanes(trace):
    ranges = {(w.lane, w.path): w for w in trace.work if w.thread}
    assert set(ranges) == {
        ("communication", "pack"),
        ("ranges", "a range of the program"),
        ("ranges", "open"),
    }
    ours = ranges["communication", "pack"]
    assert (ours.start_s, ours.end_s, ours.thread) == (20e-9, 5000e-9, 99)
    # A range without an end was open when the session ended.
    assert ranges["ranges", "open"].end_s == 5000e-9
    assert [(one.name, one.at_s) for one in trace.instants] == [("a mark", 50e-9)]


def test_times_are_of_the_day(trace):
    assert trace.began_utc_s == BEGAN_NS / 1e9
    assert trace.wall_s == 5000e-9
    assert trace.about["threads"] == {f"{PID}/99": "dask worker"}
    assert trace.about["EXPORT_SCHEMA_VERSION"] == "3.16.1"


def test_the_old_name_of_the_versions_is_known(tmp_path):
    renamed = {"META_DATA_EXPORT": "EXPORT_META_DATA"}
    trace = read_nsys(write_export(tmp_path / "a.sqlite", renamed=renamed))
    assert trace.about["EXPORT_PRODUCT_VERSION"] == "2024.6.2.225"


def test_of_very_many_kernels_the_longest_remain(tmp_path, monkeypatch):
    monkeypatch.setattr(nsys, "MAX_KERNELS", 10)
    kernels = [
        {**ROWS[KERNELS][0], "start": i * 10, "end": i * 10 + 1 + i % 50} for i in range(1000)
    ]
    trace = read_nsys(write_export(tmp_path / "a.sqlite", rows={**ROWS, KERNELS: kernels}))
    kept = [work for work in trace.work if work.path == "join"]
    assert len(kept) == 10
    assert {round((work.end_s - work.start_s) * 1e9) for work in kept} == {50}
    (address, name, n, busy_s), *_ = trace.about["kernels"]
    busy = sum(row["end"] - row["start"] for row in kernels)
    assert (name, n, round(busy_s * 1e9)) == ("join", 1000, busy)
    assert [one.n_dropped for one in trace.processes if one.address == address] == [990]


# ------------------------------------------------------------------ files that are no exports


def test_a_report_names_the_command_that_exports_it(tmp_path):
    with pytest.raises(TraceFileError, match=r"nsys export --type sqlite --output .*/a\.sqlite"):
        read_nsys(tmp_path / "a.nsys-rep")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceFileError, match=r"cannot read .*a\.sqlite: there is no such file"):
        read_nsys(tmp_path / "a.sqlite")


@pytest.mark.parametrize("content", [b"a,b\n" * 50, b"SQLite format 3\0" + b"\xff" * 400])
def test_a_file_that_is_no_database_is_refused(tmp_path, content):
    path = tmp_path / "a.sqlite"
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=r"a\.sqlite is damaged, or no export"):
        read_nsys(path)


def test_another_database_is_refused(tmp_path):
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE test (col1 INTEGER)")
    connection.close()
    with pytest.raises(TraceFileError, match=r"a\.sqlite is an SQLite file, and no export"):
        read_nsys(path)


def test_a_damaged_export_is_refused_or_read(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    content = path.read_bytes()
    n_refused = 0
    for n_left in range(100, len(content), 4096):
        path.write_bytes(content[:n_left])
        with pytest.raises(TraceFileError, match=r"a\.sqlite"):
            read_nsys(path)
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes(64) + content[place + 64 :])
        try:
            read_nsys(path)
        except TraceFileError as error:
            assert "a.sqlite" in str(error)
            n_refused += 1
    assert n_refused > 10


def test_a_text_in_place_of_a_number_is_refused(tmp_path):
    rows = {**ROWS, COPIES: [{**ROWS[COPIES][0], "start": "soon"}]}
    with pytest.raises(TraceFileError, match=r"a\.sqlite is damaged"):
        read_nsys(write_export(tmp_path / "a.sqlite", rows=rows))


def test_reading_writes_nothing(tmp_path):
    path = write_export(tmp_path / "a.sqlite")
    before = path.read_bytes()
    read_nsys(path)
    assert os.listdir(tmp_path) == ["a.sqlite"]
    assert path.read_bytes() == before


# ------------------------------------------------------------------ exports of others

EXAMPLES = "GPURT_NSYS_EXAMPLES"


@pytest.mark.skipif(EXAMPLES not in os.environ, reason=f"{EXAMPLES} names no folder of exports")
def test_exports_of_others_are_read_exactly():
    n_read = 0
    for path in sorted(pathlib.Path(os.environ[EXAMPLES]).rglob("*.sqlite")):
        with sqlite3.connect(path) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if "StringIds" not in tables:
                continue
            trace = read_nsys(path)
            n_read += 1
            sums = trace.about["kernels"]
            copies = [w for w in trace.work if w.nbytes and w.path != "memset"]
            found = {
                KERNELS: (sum(n for _, _, n, _ in sums), round(sum(s for *_, s in sums) * 1e9)),
                COPIES: (len(copies), sum(w.nbytes for w in copies)),
            }
            for table, summed in ((KERNELS, '"end" - "start"'), (COPIES, "bytes")):
                if table in tables:
                    query = f"SELECT COUNT(*), IFNULL(SUM({summed}), 0) FROM {table}"
                    assert found[table] == connection.execute(query).fetchone(), path
        connection.close()
    assert n_read
