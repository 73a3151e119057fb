"""The adapter for device frames passes the suite, on a device emulated in host memory."""

from __future__ import annotations

import msgpack
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpurt.frames.adapter import Packed, Piece, Selection, on_host
from dask_gpurt.frames.device.device_frames import DeviceFrames, DeviceLayout
from dask_gpurt.frames.gather import slots_by_table
from dask_gpurt.shuffle.plan import ExchangePlan
from tests.conformance.frame_suite import FrameSuite
from tests.frames.emulated_device import EmulatedMemory, EmulatedTables
from tests.frames.pandas_rows import PandasRows


def no_room(nbytes):
    return None


class DeviceSuite(PandasRows, FrameSuite):
    """The suite on a device with enough room."""

    room = staticmethod(EmulatedMemory)

    def adapter(self, frame):
        return DeviceFrames(EmulatedTables(), frame.iloc[:0], "slot", True, self.room)

    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        slot = pd.Series(rng.integers(0, self.n_slots, rows))
        lists = pd.ArrowDtype(pa.list_(pa.int32()))
        prices = pd.ArrowDtype(pa.decimal128(12, 2))
        return pd.DataFrame(
            {
                "slot": slot,
                "a": rng.random(rows),
                "b": pd.array(np.where(rng.random(rows) > 0.5, 1, None), dtype="Int64"),
                "text": pd.array(rng.choice(["", "a", "bcd", None], rows), dtype="str"),
                "mode": pd.Categorical(rng.choice(["p", "q", None], rows), categories=["p", "q"]),
                "list": pd.Series([[n] * (n % 3) for n in range(rows)], dtype=lists),
                "price": pd.Series(rng.integers(0, 99, rows).astype("i2"), dtype=prices),
                "day": np.arange(rows).astype("M8[ns]"),
            }
        )


class TestOnTheDevice(DeviceSuite):
    def test_shards_for_the_same_worker_stay_on_the_device(self):
        frame = self.frame(1_000, 0)
        adapter = self.adapter(frame)
        before = EmulatedMemory.copied_nbytes
        bodies = self.shards(adapter, frame, leaves=False)
        adapter.concatenate([Piece(body, 0, n) for body, n in bodies])
        assert all(body.packed.is_on_device for body, _ in bodies)
        assert EmulatedMemory.copied_nbytes == before

    def test_only_the_contents_of_an_arriving_shard_are_read(self):
        frame = self.frame(1_000, 0)
        adapter = self.adapter(frame)
        before = EmulatedMemory.copied_nbytes
        for body, n_rows in self.shards(adapter, frame, leaves=True):
            assert body.packed.is_on_device
            adapter.concatenate([Piece(body, 0, n_rows)])
        assert EmulatedMemory.copied_nbytes - before < 5 * 2_000


class TestWithoutRoom(DeviceSuite):
    """Every shard stays in host memory until an output needs it."""

    room = staticmethod(no_room)

    def test_shards_leave_a_device_without_room(self):
        frame = self.frame(1_000, 0)
        adapter = self.adapter(frame)
        before = EmulatedMemory.used_nbytes
        bodies = self.shards(adapter, frame, leaves=False)
        assert EmulatedMemory.used_nbytes == before
        assert not any(body.packed.is_on_device for body, _ in bodies)

    def test_a_shard_returns_to_the_device_once(self):
        frame = self.frame(1_000, 0)
        adapter = self.adapter(frame)
        (body, _), *_ = self.shards(adapter, frame, leaves=False)
        before = EmulatedMemory.used_nbytes
        adapter.room = EmulatedMemory  # other shards were freed meanwhile
        for start in (0, 10, 20):
            adapter.concatenate([Piece(body, start, start + 10)])
        assert EmulatedMemory.used_nbytes - before == body.nbytes
        assert body.packed.is_on_device

    def test_without_room_the_rows_of_an_output_return_alone(self):
        """All shards together may be larger than the device."""
        frame = self.frame(1_000, 0)
        adapter = self.adapter(frame)
        bodies = [body for body, _ in self.shards(adapter, frame, leaves=False)]
        before = EmulatedMemory.used_nbytes
        output = adapter.concatenate([Piece(body, 5, 15) for body in bodies])
        assert len(output) == 10 * len(bodies)
        assert EmulatedMemory.used_nbytes == before
        assert not any(body.packed.is_on_device for body in bodies)


class TestIndexed(DeviceSuite):
    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        frame = pd.DataFrame({"slot": rng.integers(0, self.n_slots, rows), "x": rng.random(rows)})
        names = pd.array([f"r{i}" for i in range(rows)], dtype="str")
        levels = [np.arange(rows), names]
        return frame.set_index(pd.MultiIndex.from_arrays(levels, names=["n", ("a", 1)]))


class TestOfASeries(DeviceSuite):
    """A frame that Dask makes of an unnamed Series: one column with a number as its label."""

    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        text = pd.array(rng.choice(["", "a", "bcd", None], rows), dtype="str")
        frame = pd.Series(text).to_frame()
        assert frame.columns.tolist() == [0]
        return frame.assign(slot=rng.integers(0, self.n_slots, rows))


def adapter_for(frame):
    return DeviceFrames(EmulatedTables(), frame.iloc[:0], "slot", True, no_room)


def test_host_memory_comes_from_the_given_allocator():
    frame = pd.DataFrame({"slot": np.zeros(100, int), "a": np.arange(100)})
    handed_out = []

    def empty(nbytes):
        handed_out.append(np.empty(nbytes, np.uint8))
        return handed_out[-1]

    opened = adapter_for(frame).open(frame)
    (packed,) = opened.gather([Selection(np.arange(100), True, empty)])
    assert packed.buffer is handed_out[0]


def test_partitions_of_several_types_are_joined_in_order():
    parts = [
        pd.DataFrame({"slot": 0, "v": pd.Series([1, 2])}),
        pd.DataFrame({"slot": 0, "v": pd.Series([1.5])}),
        pd.DataFrame({"slot": 0, "v": pd.Series([3])}),
    ]
    adapter = adapter_for(parts[0])
    pieces = []
    for part in parts:
        (body,) = adapter.open(part).gather([Selection(np.arange(len(part)), False)])
        pieces.append(Piece(body, 0, len(part)))
    assert adapter.concatenate(pieces)["v"].tolist() == [1.0, 2.0, 1.5, 3.0]


def test_another_number_of_index_levels_is_refused():
    frame = pd.DataFrame({"slot": [0], "a": [1]})
    with pytest.raises(ValueError, match="levels"):
        adapter_for(frame).open(frame.set_index([[1], [2]]))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8"])
def test_slots_by_table_agree_with_the_host(dtype):
    plan = ExchangePlan({7: "a", 0: "b", 3: "a", 200: "b"})
    numbers = np.arange(-300, 300).astype(dtype)
    if dtype == "u8":
        numbers = np.append(numbers, np.uint64(2**64 - 1))
    found = slots_by_table(np, numbers, plan.slot_table)
    np.testing.assert_array_equal(found, plan.slots(numbers))
    assert found.dtype == np.int32


LAYOUT = DeviceLayout((("meta",), ("category", True, b"abc"), ("zone", "UTC"), ("physical",)))


def test_device_layout_is_restored_from_its_key():
    assert DeviceLayout.from_key(LAYOUT.key, 4) == LAYOUT


@pytest.mark.parametrize(
    "plain",
    [
        [2, [["meta"]]],
        [1, [["meta"], ["meta"]]],
        [1, [["meta", 1]]],
        [1, [["category", 1, b""]]],
        [1, [["category", True]]],
        [1, [["zone", b"UTC"]]],
        [1, [["other"]]],
        [1, [[]]],
        [1, [3]],
        [1, 3],
        [1],
        3,
        None,
        {"a": 1},
    ],
)
def test_invalid_column_layouts_are_refused(plain):
    with pytest.raises(ValueError, match="not the layout"):
        DeviceLayout.from_key(msgpack.packb(plain), 1)


@settings(derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 5))
def test_any_bytes_are_a_layout_or_refused(key, n_columns):
    try:
        layout = DeviceLayout.from_key(key, n_columns)
    except ValueError:
        return
    assert len(layout.kinds) == n_columns


@settings(derandomize=True, max_examples=300)
@given(st.data())
def test_a_damaged_shard_is_refused_or_has_its_rows(data):
    """The adapter checks a peer's description of its columns before it uses it."""
    frame = pd.DataFrame({"slot": 0, "a": np.arange(50), "t": ["ab"] * 50})
    adapter = adapter_for(frame)
    opened = adapter.open(frame)
    (packed,) = opened.gather([Selection(np.arange(50), True)])
    buffer = on_host(packed).buffer.copy()
    end = buffer.nbytes
    position = data.draw(st.integers(end - packed.pickle_nbytes, end - 1))
    buffer[position] = data.draw(st.integers(0, 255))
    try:
        body = adapter.unpack(opened.layout_key, Packed(buffer, 50, 0, packed.pickle_nbytes))
        # Only the library notices strings with fewer bytes than their offsets say.
        table = body.rows(adapter.tables, 0, 50, no_room)
    except ValueError:
        return
    assert [len(column) for column in table] == [50] * 3
