"""An export of Nsight Systems joins our trace by the time of day, and finds the workers in it."""

from __future__ import annotations

import pytest

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import LaneWork, Trace, TraceProcess
from dask_gpurt.tracing.files import read, write
from dask_gpurt.tracing.nsight.join_traces import join
from dask_gpurt.tracing.nsight.nsys import read_nsys
from dask_gpurt.tracing.report.happenings import kernel_rows
from tests.tracing.nsight.exports import BEGAN_NS, OTHER_PID, PID, write_export

ADDRESS = "tcp://10.0.0.1:4711"


@pytest.fixture
def theirs(tmp_path):
    return read_nsys(write_export(tmp_path / "a.sqlite"))


def ours(later_s=0.0, wall_s=1.0, host="node1.cluster.example", pids=None):
    """Return a trace of ours that begins some time after the session of Nsight Systems."""
    return Trace(
        [TraceProcess(ADDRESS, "w0", host)],
        [LaneWork(0, "compute", "join", 1, 0.25, 0.5)],
        began_utc_s=BEGAN_NS / 1e9 + later_s,
        wall_s=wall_s,
        about={"pids": {ADDRESS: PID} if pids is None else pids},
    )


def test_times_become_times_of_our_trace(theirs):
    # Half a second before the session of Nsight Systems began.
    joined = join(ours(-0.5), theirs)
    first = next(work for work in joined.work if work.path == "pack")
    assert first.start_s == pytest.approx(0.5 + 20e-9, abs=1e-6)
    assert joined.work == sorted(joined.work, key=lambda work: work.start_s)
    assert joined.began_utc_s == BEGAN_NS / 1e9 - 0.5
    assert len(joined.work) == 1 + len(theirs.work)
    assert joined.instants[0].at_s == pytest.approx(0.5, abs=1e-6)


def test_work_of_a_worker_is_attributed_to_it(theirs):
    joined = join(ours(-0.5), theirs)
    assert [process.address for process in joined.processes] == [
        ADDRESS,
        f"nsys://node1/{OTHER_PID}/0",
    ]
    by_process = [[w.path for w in joined.work if w.process == number] for number in range(2)]
    assert by_process[1] == ["scan"]
    assert {"pack", "memset", "host to device"} <= set(by_process[0])
    assert {w.lane for w in joined.work if w.path == "memset"} == {"GPU 0 stream 7"}
    nbytes = sum(w.nbytes for w in theirs.work)
    assert sum(w.nbytes for w in joined.work) == nbytes + 1


@pytest.mark.parametrize(
    "about", [{"pids": {}}, {"pids": {ADDRESS: PID}, "host": "node2"}, {"pids": {ADDRESS: 1}}]
)
def test_work_of_other_programs_stays_with_them(theirs, about):
    joined = join(ours(-0.5, **about), theirs)
    assert len(joined.processes) == 1 + len(theirs.processes)
    assert [work.path for work in joined.work if work.process == 0] == ["join"]


def test_a_host_is_known_by_its_address_too(theirs):
    joined = join(ours(-0.5, host="10.0.0.1"), theirs)
    assert len(joined.processes) == 1 + len(theirs.processes)


def test_events_outside_of_our_trace_are_left_out(theirs):
    # Our trace begins 1,300 ns after the session, and lasts 1,800 ns.
    joined = join(ours(1.3e-6, wall_s=1.8e-6), theirs)
    assert {w.path for w in joined.work} >= {"scan", "host to device", "pack"}
    assert "memset" not in {w.path for w in joined.work}
    assert joined.instants == []


def test_several_exports_join_one_after_the_other(theirs, tmp_path):
    joined = join(join(ours(-0.5), theirs), theirs)
    assert len(joined.about["joined"]) == 2
    assert kernel_rows(joined.about) == sorted(
        2 * kernel_rows(theirs.about), key=lambda row: -row.busy_s
    )
    assert joined.about["pids"] == {ADDRESS: PID}
    write(joined, tmp_path / "joined.json.gz")
    assert len(read(tmp_path / "joined.json.gz").work) == len(joined.work)


@pytest.mark.parametrize("later_s", [100.0, -100.0])
def test_traces_of_different_times_are_refused(theirs, later_s):
    with pytest.raises(TraceFileError, match=r"no time in common: .* 100\.0 s"):
        join(ours(later_s), theirs)


def test_a_session_without_a_time_of_day_is_refused(tmp_path):
    export = write_export(tmp_path / "a.sqlite", ("TARGET_INFO_SESSION_START_TIME",))
    with pytest.raises(TraceFileError, match="trace of Nsight Systems has no time of day"):
        join(ours(), read_nsys(export))
    with pytest.raises(TraceFileError, match="our trace has no time of day"):
        join(Trace([]), read_nsys(write_export(tmp_path / "b.sqlite")))
