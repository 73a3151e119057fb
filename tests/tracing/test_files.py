"""Files give back the trace that was written, or say what is wrong with them."""

from __future__ import annotations

import errno
import gzip
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.events import LaneWork, Trace, TraceProcess
from dask_gpurt.tracing.files import ENDINGS, check, read, write
from tests.tracing.shuffle_trace import shuffle_trace
from tests.tracing.traces import UNITS_NS, traces

pytest.importorskip("perfetto")

every_ending = pytest.mark.parametrize("ending", ENDINGS)
#: Endings that only name another format, or compress, are tested with a shuffle.
every_format = pytest.mark.parametrize("ending", [".json", ".perfetto-trace"])


@every_format
@given(data=st.data())
def test_a_file_gives_back_the_trace(tmp_path_factory, ending, data):
    path = tmp_path_factory.getbasetemp() / f"trace{ending}"
    trace = data.draw(traces(UNITS_NS[ending]))
    write(trace, path)
    assert read(path) == trace


@every_ending
def test_a_file_gives_back_a_shuffle(tmp_path, ending):
    trace = shuffle_trace(200)
    write(trace, tmp_path / f"trace{ending}")
    found = read(tmp_path / f"trace{ending}")
    if UNITS_NS[ending] == 1:
        assert found == trace
    assert found.n_events == trace.n_events
    assert sum(one.nbytes for one in found.work) == sum(one.nbytes for one in trace.work)


@given(data=st.data())
def test_times_in_json_are_off_by_half_a_unit(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "rounded.json"
    trace = data.draw(traces())
    write(trace, path)
    found = read(path)
    for ours, theirs in zip(trace.work, found.work, strict=True):
        assert ours._replace(start_s=0, end_s=0) == theirs._replace(start_s=0, end_s=0)
        assert abs(ours.start_s - theirs.start_s) < 51e-9
        assert abs(ours.end_s - theirs.end_s) < 51e-9
    for ours, theirs in zip(trace.tasks, found.tasks, strict=True):
        assert (ours.number, ours.needs) == (theirs.number, theirs.needs)
        for name in ("ready_s", "assigned_s", "here_s", "start_s", "known_s"):
            assert abs(getattr(ours, name) - getattr(theirs, name)) < 551e-9


@pytest.mark.parametrize("ending, most", [(".json.gz", 25), (".perfetto-trace", 60)])
def test_an_event_takes_few_bytes(tmp_path, ending, most):
    trace = shuffle_trace(1000)
    path = tmp_path / f"trace{ending}"
    write(trace, path)
    assert path.stat().st_size / trace.n_events <= most


@every_ending
def test_equal_traces_have_equal_files(tmp_path, ending):
    for name in ("a", "b"):
        write(shuffle_trace(20), tmp_path / f"{name}{ending}")
    first, second = (tmp_path / f"{name}{ending}" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_what_has_no_place_in_a_picture_is_mended(tmp_path):
    backwards = LaneWork(0, "compute", "a task", 1, 2.0, 1.0)
    trace = Trace([TraceProcess("tcp://1", "w", "h")], [backwards])
    write(trace, tmp_path / "trace.json")
    assert read(tmp_path / "trace.json").work == [backwards._replace(end_s=2.0)]


MEMORY = """
import resource, sys
from dask_gpurt.tracing.files import read, write
from tests.tracing.shuffle_trace import shuffle_trace
one = shuffle_trace(800)
# What is imported for the format is no part of it.
write(shuffle_trace(1), sys.argv[1])
trace = shuffle_trace(10)
for copy in range(4):
    for name in ("work", "tasks", "samples"):
        getattr(trace, name).extend(getattr(one, name))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
write(trace, sys.argv[1])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(trace.n_events, (after - before) / trace.n_events)
"""


@pytest.mark.parametrize("ending", [".json.gz", ".perfetto-trace"])
def test_writing_needs_little_memory(tmp_path, ending):
    """A million events take at most half a gigabyte besides the trace."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path / f"trace{ending}")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    n, nbytes = map(float, run.stdout.split())
    assert n > 50_000
    assert nbytes < 500


ROOT = pathlib.Path(__file__).parents[2]

# ------------------------------------------------------------------ files that cannot be written


def test_an_unknown_ending_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    with pytest.raises(TraceFileError, match=r"cannot read .*trace\.csv: No such"):
        read(path)
    path.touch()
    for act in (lambda path: write(Trace([]), path), read):
        with pytest.raises(TraceFileError, match=r"trace\.csv names no format.*\.json\.gz"):
            act(path)


def test_a_missing_package_names_the_other_format(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    for act in (lambda path: write(Trace([]), path), read):
        (tmp_path / "a.pftrace").write_bytes(b"\x0a\x00")
        with pytest.raises(TraceFileError, match=r"pip install.*\.json\.gz"):
            act(tmp_path / "a.pftrace")


FULL = """
import resource, signal, sys
from dask_gpurt.errors import TraceFileError
from dask_gpurt.tracing.files import write
from tests.tracing.shuffle_trace import shuffle_trace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write(shuffle_trace(1000), sys.argv[1])
except TraceFileError as error:
    print(error)
"""


@every_ending
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, ending):
    path = tmp_path / f"trace{ending}"
    path.write_text("as it was")
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.stdout.strip() == f"cannot write {path}: {os.strerror(errno.EFBIG)}", run.stderr
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == [path.name]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(TraceFileError, match=r"cannot write .*nowhere/a\.json: No such file"):
        write(Trace([]), tmp_path / "nowhere" / "a.json")
    with pytest.raises(TraceFileError, match=r"cannot read .*nowhere/a\.json: No such file"):
        read(tmp_path / "nowhere" / "a.json")


# ------------------------------------------------------------------ damaged and foreign files


@every_ending
def test_a_file_that_is_cut_is_refused(tmp_path, ending):
    path = tmp_path / f"trace{ending}"
    write(shuffle_trace(20), path)
    content = path.read_bytes()
    for n_left in (*range(0, len(content) - 3, len(content) // 50), len(content) - 3):
        path.write_bytes(content[:n_left])
        with pytest.raises(TraceFileError, match=f"trace{ending}"):
            read(path)


@pytest.mark.parametrize("ending", [".json.gz", ".perfetto-trace"])
def test_a_flipped_bit_changes_nothing_or_is_noticed(tmp_path, ending):
    path = tmp_path / f"trace{ending}"
    trace = shuffle_trace(5)
    write(trace, path)
    content = bytearray(path.read_bytes())
    whole = read(path)
    for place in range(0, len(content), max(1, len(content) // 300)):
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            found = read(path)
        except TraceFileError as error:
            assert path.name in str(error)
        else:
            # Some bits of gzip's header say nothing of the content.
            assert found == whole
        content[place] ^= 1 << place % 8


FOREIGN = {
    "empty": b"",
    "text": b"a,b\n1,2\n",
    "another JSON": b'{"a": 1}',
    "Chrome's own": b'{"traceEvents":[\n{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":1}\n]}\n',
    "no object": b'[{"ph":"X"}][\n',
    "binary": bytes(range(256)) * 40,
    "a long length": b"\x0a\xff\xff\xff\xff\xff\x7f",
    "compressed": gzip.compress(b"\0" * 1000),
}


@every_ending
@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_another_program_is_refused(tmp_path, ending, content):
    path = tmp_path / f"trace{ending}"
    path.write_bytes(gzip.compress(content) if ending == ".json.gz" else content)
    with pytest.raises(
        TraceFileError, match=rf"trace{ending} is no trace that can be read"
    ) as raised:
        read(path)
    assert len(str(raised.value)) < len(str(path)) + 300
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=rf"trace{ending}"):
        read(path)


def json_lines(path: pathlib.Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def test_a_newer_format_names_both_versions(tmp_path):
    path = tmp_path / "trace.json"
    write(Trace([]), path)
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(TraceFileError, match=r"format 2.*reads format 1"):
        read(path)


def test_fields_of_a_newer_version_are_passed_over(tmp_path):
    path = tmp_path / "trace.json"
    trace = shuffle_trace(2)
    write(trace, path)
    whole = read(path)
    newer = path.read_text().replace('"args":{"nbytes"', '"args":{"newer":[1],"nbytes"')
    newer = newer.replace('"n_dropped"', '"also_newer": 1, "n_dropped"')
    assert newer.count("newer") > len(trace.processes)
    path.write_text(newer)
    assert read(path) == whole


@pytest.mark.parametrize(
    "old, new, why",
    [
        ('"pid":1,', '"pid":9,', "no such process"),
        ('"for_data_us":', '"for_date_us":', "for_data_us"),
        ('"needs":"0"', '"needs":"0..99999999999"', "no range of tasks"),
        ('"ts":', '"ts":null,"t":', "damaged"),
        ('"nbytes":', '"nbytes":"many","n":', "'many' as its nbytes"),
    ],
    ids=["process", "argument", "range", "time", "type"],
)
def test_content_that_contradicts_itself_is_refused(tmp_path, old, new, why):
    path = tmp_path / "trace.json"
    write(shuffle_trace(2), path)
    lines = json_lines(path)
    (place, line), *_ = [
        (i, line) for i, line in enumerate(lines) if '"ph":"X"' in line and old in line
    ]
    lines[place] = line.replace(old, new)
    path.write_text("".join(lines))
    with pytest.raises(TraceFileError, match=why):
        read(path)


def test_a_missing_line_is_noticed(tmp_path):
    path = tmp_path / "trace.json"
    write(shuffle_trace(2), path)
    lines = json_lines(path)
    lines.pop(next(i for i, line in enumerate(lines) if '"ph":"C"' in line or '"ph":"X"' in line))
    path.write_text("".join(lines))
    with pytest.raises(TraceFileError, match="should have"):
        read(path)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/nowhere/x.json", "there is no folder /nowhere"),
        ("{folder}/taken.json", "it is a folder"),
        ("/proc/x.json", "cannot write /proc/x.json: "),
        ("{folder}/x.txt", "names no format of traces"),
    ],
)
def test_a_path_that_cannot_be_written_is_found_out_first(tmp_path, path, why):
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(TraceFileError, match=why):
        check(path.format(folder=tmp_path))
    assert os.listdir(tmp_path) == ["taken.json"]
