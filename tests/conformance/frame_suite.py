"""The suites that frame adapters must pass. Subclass one and say how to make frames.

They compare the results with those of the frame's own library for the same rows. So the suites know
nothing of layouts, buffers or batches. `FrameSuite` is for all adapters. `HostFrameSuite` is for
adapters with shards in host memory.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dask_gpurt.frames.adapter import Packed, Piece, Selection, fresh, on_host
from dask_gpurt.shuffle.plan import ExchangePlan


class FrameSuite:
    """Set `adapter`, `frame`, `rows_of` and `assert_equal` in a subclass."""

    n_slots = 5

    def adapter(self, frame: Any) -> Any:
        """Return an adapter for frames like this one. Column `slot` has the output partition."""
        raise NotImplementedError

    def frame(self, rows: int, seed: int) -> Any:
        """Return a frame with a column `slot` of numbers from 0 to `n_slots` - 1."""
        raise NotImplementedError

    def rows_of(self, frame: Any, slot: int) -> Any:
        """Return the rows of one slot without the column `slot`, selected by the library."""
        raise NotImplementedError

    def assert_equal(self, got: Any, expected: Any) -> None:
        raise NotImplementedError

    def shards(self, adapter, frame, *, leaves):
        opened = adapter.open(frame)
        rows, offsets = opened.group(ExchangePlan(dict.fromkeys(range(self.n_slots), "worker")))
        selections = [
            Selection(rows[offsets[slot] : offsets[slot + 1]], leaves)
            for slot in range(self.n_slots)
        ]
        gathered = opened.gather(selections)
        if leaves:
            assert all(isinstance(one, Packed) for one in gathered)
            gathered = [adapter.unpack(opened.layout_key, one) for one in gathered]
        return [(body, len(s.rows)) for body, s in zip(gathered, selections, strict=True)]

    def packed(self, opened, n_rows, empty=fresh):
        """Return the first rows of a partition as a host buffer."""
        (packed,) = opened.gather([Selection(np.arange(n_rows, dtype=np.intp), True, empty)])
        return on_host(packed, empty)

    def test_unwanted_rows_are_dropped(self):
        frame = self.frame(200, 8)
        adapter = self.adapter(frame)
        opened = adapter.open(frame)
        # Some partitions are not wanted, and others do not exist.
        slot_of = {1: "a", 4: "b", 9: "b"}
        rows, offsets = opened.group(plan := ExchangePlan(slot_of))
        assert offsets[-1] == len(rows) < 200
        for slot, partition in enumerate(plan.partitions):
            mine = rows[offsets[slot] : offsets[slot + 1]]
            if len(mine):
                (body,) = opened.gather([Selection(mine, False)])
                got = adapter.concatenate([Piece(body, 0, len(mine))])
                self.assert_equal(got, self.rows_of(frame, partition))

    @pytest.mark.parametrize("leaves", [False, True])
    @pytest.mark.parametrize("rows", [0, 1, 200])
    def test_gathered_pieces_concatenate_to_the_rows_of_a_slot(self, rows, leaves):
        frame = self.frame(rows, 0)
        adapter = self.adapter(frame)
        for slot, (body, n_rows) in enumerate(self.shards(adapter, frame, leaves=leaves)):
            if n_rows:
                got = adapter.concatenate([Piece(body, 0, n_rows)])
                self.assert_equal(got, self.rows_of(frame, slot))

    def test_packed_and_unpacked_bodies_are_the_same(self):
        frame = self.frame(100, 1)
        adapter = self.adapter(frame)
        for slot, (body, n_rows) in enumerate(self.shards(adapter, frame, leaves=False)):
            again = adapter.unpack(body.layout_key, on_host(adapter.pack(body)))
            self.assert_equal(
                adapter.concatenate([Piece(again, 0, n_rows)]), self.rows_of(frame, slot)
            )

    def test_pieces_keep_their_order_and_their_bounds(self):
        frames = [self.frame(60, seed) for seed in range(3)]
        adapter = self.adapter(frames[0])
        bodies = [self.shards(adapter, frame, leaves=bool(i % 2)) for i, frame in enumerate(frames)]
        for slot in range(self.n_slots):
            mine = [shards[slot] for shards in bodies]
            halves = [Piece(b, n // 3, n - n // 4) for b, n in mine]
            expected = [
                self.rows_of(frame, slot).iloc[n // 3 : n - n // 4]
                for frame, (_, n) in zip(frames, mine, strict=True)
            ]
            self.assert_equal(adapter.concatenate(halves), self.joined(expected))

    def test_merged_bodies_hold_the_selected_rows(self):
        """Some were gathered here and others were received, and the rows are in another order."""
        frames = [self.frame(60, seed) for seed in range(3)]
        adapter = self.adapter(frames[0])
        if adapter.merge is None:
            pytest.skip("this adapter merges no bodies")
        bodies = [self.shards(adapter, frame, leaves=bool(i % 2)) for i, frame in enumerate(frames)]
        for slot in range(self.n_slots):
            mine = [shards[slot] for shards in bodies]
            whole = self.joined([self.rows_of(frame, slot) for frame in frames])
            rows = np.roll(np.arange(len(whole), dtype=np.intp)[::-1], 3)
            selections = [Selection(rows[:7], False), Selection(rows[7:], False)]
            merged = adapter.merge([body for body, _ in mine], selections)
            assert len({body.layout_key for body, _ in mine} | {m.layout_key for m in merged}) == 1
            for body, selection in zip(merged, selections, strict=True):
                got = adapter.concatenate([Piece(body, 0, len(selection.rows))])
                self.assert_equal(got, whole.iloc[selection.rows])
                again = adapter.unpack(body.layout_key, on_host(adapter.pack(body)))
                assert abs(again.nbytes - body.nbytes) <= again.nbytes

    @pytest.mark.parametrize("leaves", [False, True])
    def test_partitions_that_are_joined_are_cut_like_one(self, leaves):
        frames = [self.frame(n, seed) for seed, n in enumerate((60, 0, 1, 40))]
        adapter = self.adapter(frames[0])
        if adapter.join is None:
            pytest.skip("this adapter joins no partitions")
        plan = ExchangePlan({slot: "worker" for slot in range(self.n_slots) if slot != 1})
        opened = [adapter.open(frame) for frame in frames]
        alike = [one for one in opened if one.layout_key == opened[0].layout_key]
        mine = [f for f, one in zip(frames, opened, strict=True) if one in alike]
        joined = adapter.join(alike)
        rows, offsets, n_rows = joined.group_sources(plan)
        bounds = pairwise(offsets)
        gathered = joined.gather([Selection(rows[a:b], leaves) for a, b in bounds])
        for slot, partition in enumerate(plan.partitions):
            of_frames = [self.rows_of(frame, partition) for frame in mine]
            assert n_rows[:, slot].tolist() == [len(one) for one in of_frames]
            body = gathered[slot]
            if leaves:
                body = adapter.unpack(joined.layout_key, body)
            if count := sum(map(len, of_frames)):
                got = adapter.concatenate([Piece(body, 0, count)])
                self.assert_equal(got, self.joined([one for one in of_frames if len(one)]))

    def joined(self, frames: list[Any]) -> Any:
        """Return the library's concatenation of frames."""
        raise NotImplementedError

    def test_concatenated_result_does_not_keep_its_shards_alive(self):
        """Otherwise, memory would stay until a worker's last output is gone."""
        frame = self.frame(5_000, 3)
        adapter = self.adapter(frame)
        opened = adapter.open(frame)
        packed = self.packed(opened, 5_000)
        result = adapter.concatenate([Piece(adapter.unpack(opened.layout_key, packed), 0, 2_000)])
        before = result.copy()
        packed.buffer[:] = 255
        self.assert_equal(result, before)

    def test_sections_cover_a_packed_shard(self):
        frame = self.frame(300, 7)
        adapter = self.adapter(frame)
        opened = adapter.open(frame)
        names = []
        for n_rows in (300, 100):
            packed = self.packed(opened, n_rows)
            sections = adapter.sections(opened.layout_key, packed)
            end = 0
            for _, offset, nbytes, itemsize in sections:
                assert offset == end
                assert nbytes > 0
                assert itemsize > 0
                end += nbytes
            assert end == packed.buffer.nbytes
            names.append([name for name, *_ in sections])
            assert len(set(names[-1])) == len(names[-1])
        # A receiver that has only the layout's key gets the same sections.
        assert self.adapter(frame).sections(opened.layout_key, packed) == sections
        # Padding depends on the number of bytes.
        first, second = ([n for n in found if not n.startswith("padding")] for found in names)
        assert first == second

    def test_concatenating_no_pieces_gives_an_empty_frame(self):
        frame = self.frame(10, 4)
        got = self.adapter(frame).concatenate([])
        assert len(got) == 0
        assert list(got.columns) == list(self.rows_of(frame, 0).columns)

    def test_wrong_kind_and_wrong_columns_are_refused(self):
        frame = self.frame(10, 5)
        adapter = self.adapter(frame)
        with pytest.raises(TypeError):
            adapter.open([1, 2, 3])
        with pytest.raises(ValueError, match="columns"):
            adapter.open(frame[["slot"]])

    @pytest.mark.parametrize("change", ["short", "long", "rows", "arrow", "pickle", "layout"])
    def test_buffers_that_do_not_fit_are_refused(self, change):
        frame = self.frame(100, 6)
        adapter = self.adapter(frame)
        opened = adapter.open(frame)
        good = self.packed(opened, 100)
        key, buffer, rows = opened.layout_key, good.buffer, good.n_rows
        sections = [good.arrow_nbytes, good.pickle_nbytes]
        if change == "short":
            buffer = buffer[:-8]
        elif change == "long":
            buffer = np.concatenate([buffer, buffer[:8]])
        elif change == "rows":
            rows += 1
        elif change == "arrow":
            sections[0] += 8
        elif change == "pickle":
            sections[1] += 8
        else:
            key = key[:-3]
        with pytest.raises(ValueError):
            adapter.unpack(key, Packed(buffer, rows, *sections))


class HostFrameSuite(FrameSuite):
    """The suite for adapters of host frames."""

    def test_memory_comes_from_the_given_allocator(self):
        frame = self.frame(5_000, 2)
        adapter = self.adapter(frame)
        handed_out = []

        def empty(nbytes):
            handed_out.append(np.empty(nbytes, dtype=np.uint8))
            return handed_out[-1]

        opened = adapter.open(frame)
        packed = self.packed(opened, 5_000, empty)
        assert packed.buffer.base is handed_out[0] or packed.buffer is handed_out[0]
        body = adapter.unpack(opened.layout_key, packed)
        n_before = len(handed_out)
        adapter.concatenate([Piece(body, 0, 5_000)], empty)
        assert len(handed_out) > n_before
