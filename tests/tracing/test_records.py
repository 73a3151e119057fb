"""Recorded events come back as they were, and damage never goes unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpurt.tracing import records
from dask_gpurt.tracing.records import RecordEncoder, decode, key_hash

TEXT = st.text(max_size=20)
TIME = st.floats(-1e9, 1e9)
SMALL = st.integers(0, 2**32 - 1)


@given(
    st.lists(st.tuples(TEXT, TEXT, st.integers(0, 2**63), TIME, TIME, TEXT, TEXT, SMALL, SMALL)),
    st.integers(1, 5),
)
def test_work_comes_back_as_it_was(entries, n_in_block):
    encoder = RecordEncoder()
    data = b""
    for number, entry in enumerate(entries):
        encoder.work(*entry, key=number, thread=7, encoded_nbytes=number + 9)
        if number % n_in_block == 0:
            data += encoder.block()
    texts, names, rows, problem = decode(data + encoder.block())
    assert problem == ""
    found = [
        (
            *(names[row["lane"]], texts[row["path"]], row["nbytes"]),
            *(row["start_s"], row["end_s"], texts[row["peer"]], names[row["way"]]),
            *(row["run"], row["message"]),
        )
        for row in rows
    ]
    as_read = [
        (*map(readable, entry[:2]), *entry[2:5], *map(readable, entry[5:7]), *entry[7:])
        for entry in entries
    ]
    assert found == as_read
    assert [names[row["thread"]] for row in rows] == ["7"] * len(entries)
    assert list(rows["key"]) == list(range(len(entries)))
    assert list(rows["encoded_nbytes"]) == [number + 9 for number in range(len(entries))]


def readable(text):
    """Return a text as a file has it: lone surrogates have no encoding."""
    return text.encode(errors="replace").decode()


def test_parts_of_a_task_come_back():
    encoder = RecordEncoder()
    encoder.key(3, key_hash(("x", 1)), "x")
    encoder.task_run(3, here_s=1.0, start_s=1.5, end_s=2.0)
    encoder.assigned(9, "x", "tcp://a:1", ready_s=0.5, assigned_s=0.75, known_s=2.5, nbytes=100)
    encoder.times(9, key_hash(("x", 1)), here_s=1.0, start_s=1.5, end_s=2.0, thread=11)
    encoder.needs(9, [1, 2, 3, 4, 5, 6])
    texts, names, rows, _ = decode(encoder.block())
    assert names == ["", "11"]
    kinds = [records.KEY, records.RUN, records.ASSIGNED, records.TIMES, records.NEEDS]
    assert list(rows["kind"]) == [*kinds, records.NEEDS]
    key, run, assigned, times, *needs = rows
    assert key["nbytes"] == times["nbytes"] == key_hash(("x", 1))
    assert run["message"] == times["message"] == 500_000
    assert texts[assigned["path"]] == "x" and texts[assigned["peer"]] == "tcp://a:1"
    assert [row["n"] for row in needs] == [4, 2]


def test_lanes_keep_their_names_after_very_many_keys():
    """Keys are shown as a whole if the user asks for it."""
    encoder = RecordEncoder()
    for number in range(1 << 16):
        encoder.key(number, 0, f"key {number}")
    encoder.work("disk", "write", 100, 0.0, 1.0, way="direct", thread=5)
    events = decode(encoder.block())
    row = events.records[-1]
    assert [events.names[row[one]] for one in ("lane", "way", "thread")] == ["disk", "direct", "5"]


def test_names_beyond_the_most_are_left_out():
    encoder = RecordEncoder()
    for number in range((1 << 16) + 1):
        encoder.work(f"stream {number}", "copy", 1, 0.0, 1.0)
    events = decode(encoder.block())
    lanes = [events.names[number] for number in events.records["lane"][-3:]]
    assert lanes == [f"stream {(1 << 16) - 2}", "", ""]


@pytest.fixture(scope="module")
def two_blocks():
    encoder = RecordEncoder()
    for number in range(20):
        encoder.work("lane", f"path {number}", 100, 0.0, 1.0, peer="tcp://a:1")
    first = encoder.block()
    for number in range(20):
        encoder.work("lane", f"path {number + 10}", 100, 0.0, 1.0, peer="tcp://a:1")
    return first, encoder.block()


@given(position=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_a_flipped_byte_ends_the_file_before_its_block(two_blocks, position, flip):
    first, second = two_blocks
    data = bytearray(first + second)
    position %= len(data)
    data[position] ^= flip
    _, _, rows, problem = decode(data)
    assert len(rows) == (20 if position >= len(first) else 0)
    assert "damaged after" in problem


@given(st.integers(0, 10**6))
def test_a_cut_file_has_its_whole_blocks(two_blocks, length):
    data = b"".join(two_blocks)
    length %= len(data)
    _, _, rows, problem = decode(data[:length])
    n_whole = 20 if length >= len(two_blocks[0]) else 0
    assert len(rows) == n_whole
    assert bool(problem) == (length not in (0, len(two_blocks[0])))


@given(st.binary(max_size=200))
def test_other_bytes_are_no_events(data):
    _, _, rows, problem = decode(data)
    assert len(rows) == 0 and bool(problem) == bool(data)


def test_an_event_takes_at_most_sixty_bytes():
    encoder = RecordEncoder()
    n = 50_000
    for number in range(n):
        peer = f"tcp://10.0.0.{number % 16}:40000"
        encoder.work("communication", "send", 8 << 20, 1.0, 2.0, peer, "tcp", 1, number, 0, 1)
    assert len(encoder.block()) / n <= 60


def test_texts_beyond_the_limit_share_one(monkeypatch):
    monkeypatch.setattr(records, "MOST_TEXTS", 10)
    encoder = RecordEncoder()
    for number in range(100):
        encoder.instant(f"name {number}", 0.0)
    texts, _, rows, problem = decode(encoder.block())
    assert problem == "" and len(texts) <= 12
    assert texts[rows["path"][0]] == "name 0" and texts[rows["path"][-1]] == "(more)"


def test_equal_keys_have_equal_hashes_in_all_processes():
    assert key_hash(("x", 1)) == 0x4060A0DB6736BC13
    assert len({key_hash(("x", number)) for number in range(10_000)}) == 10_000
    assert np.uint64(key_hash("y")) == key_hash("y")
