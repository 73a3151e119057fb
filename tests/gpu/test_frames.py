"""Frames and arrays on a real device: the suites of the ports, and shuffles on whole clusters.

Without a GPU, the tests only check that the libraries, if installed, have the calls. Skips give a
reason. Our own modules must always import, so an import error of theirs never causes a skip.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import types
from functools import partial
from typing import Any

import numpy as np
import pytest

from dask_gpurt.devices.device_budget import DeviceBudget
from dask_gpurt.frames.adapter import Packed, Piece, Selection, on_host
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.rechunking import Rechunking
from dask_gpurt.frames.device.device_contents import DeviceColumn
from dask_gpurt.frames.device.device_frames import DeviceFrames
from tests.conformance.frame_suite import FrameSuite
from tests.frames.device.test_device_contents import COLUMNS, MEMORY_NBYTES, N_ROWS
from tests.frames.emulated_device import EmulatedMemory
from tests.gpu.requirements import NO_GPU, needs_gpu


def missing(*names: str) -> str | None:
    """Return why these libraries cannot be imported, or None."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (the extra cuda13)"
    return None


NO_CUDF = missing("cudf", "pylibcudf", "cupy", "rmm", "dask_cudf")
needs_libraries = pytest.mark.skipif(NO_CUDF is not None, reason=str(NO_CUDF))
needs_cudf = pytest.mark.skipif((NO_CUDF or NO_GPU) is not None, reason=str(NO_CUDF or NO_GPU))

if NO_CUDF is None:
    import cudf
    import pylibcudf
    import rmm

    from dask_gpurt.frames.device.cudf_ import CudfMemory, CudfTables
if missing("cupy") is None:
    import cupy

    from dask_gpurt.frames.device.cupy_ import CupyArrays, CupyMemory


def no_room(nbytes):
    return None


@needs_libraries
def test_called_library_functions_exist():
    """Checks signatures only. The type checker checks calls to pylibcudf and RMM."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (cudf.DataFrame.to_pylibcudf, (None,), {}),
        (cudf.DataFrame.from_pylibcudf, (None, {}), {}),
        (cudf.DataFrame.set_index, (None, []), {"inplace": True}),
        (cudf.Index.to_frame, (None,), {"index": False, "name": 0}),
        (cudf.RangeIndex.to_frame, (None,), {"index": False, "name": 0}),
        (cudf.MultiIndex.to_frame, (None,), {"index": False, "name": [0]}),
        (cudf.CategoricalIndex.from_codes, (None,), {"categories": None, "ordered": True}),
        (cudf.Index.from_arrow, (None,), {}),
        (cudf.Index.to_arrow, (None,), {}),
        (cudf.concat, ([],), {}),
        (cupy.bincount, (None,), {"minlength": 1}),
        (cupy.asarray, (None,), {"dtype": np.int32}),
        (cupy.where, (None, None, None), {}),
    ]
    for call, arguments, named in calls:
        inspect.signature(call).bind(*arguments, **named)
    wanted = {
        pylibcudf.copying: ("gather", "slice", "empty_like"),
        pylibcudf.sorting: ("stable_sorted_order",),
        pylibcudf.concatenate: ("concatenate",),
        pylibcudf.Column: ("from_cuda_array_interface", "device_buffer_size", "null_mask"),
        pylibcudf.gpumemoryview: ("byte_slice", "ptr", "obj"),
    }
    for owner, names in wanted.items():
        assert all(hasattr(owner, name) for name in names), owner


def described(column, base):
    """Describe the buffers of a column in memory that starts at `base`."""
    data, mask = column.data(), column.null_mask()
    nbytes = data.size if data is not None else 0
    return DeviceColumn(
        type=pylibcudf.TypeId(column.type().id()).name,
        n_rows=column.size(),
        n_missing=column.null_count(),
        offset=data.ptr - base if nbytes else 0,
        nbytes=nbytes,
        mask=mask.ptr - base if column.null_count() else None,
        scale=column.type().scale(),
        children=tuple(described(child, base) for child in column.children()),
    )


@needs_libraries
def test_columns_over_memory_are_described_and_accepted_by_cudf():
    """No code reads the columns, so host memory suffices."""
    memory = EmulatedMemory(MEMORY_NBYTES)
    tables = CudfTables()
    table = tables.view(memory, COLUMNS)
    base = memory.__cuda_array_interface__["data"][0]
    assert tuple(described(column, base) for column in table.columns()) == COLUMNS
    meta = cudf.DataFrame.from_pylibcudf(table, {"columns": ["key", "text", "list", "price"]})
    meta.set_index("key", inplace=True)
    columns = table.columns()
    table = pylibcudf.Table([*columns[1:], columns[0]])
    frame = tables.put_together(table, [("meta",)] * 4, meta)
    assert len(frame) == N_ROWS
    assert frame.dtypes.tolist() == meta.dtypes.tolist()
    assert (frame.index.name, frame.index.dtype) == ("key", np.int64)
    again, kinds = tables.take_apart(frame, meta)
    assert kinds == [("meta",)] * 4
    assert [described(column, base) for column in again.columns()] == [*COLUMNS[1:], COLUMNS[0]]


@needs_libraries
def test_dask_cudf_leaves_the_choice_of_a_shuffle_to_dask():
    import dask
    import dask_cudf

    assert dask.config.get("dataframe.shuffle.method", None) is None
    sources = [inspect.getsource(dask_cudf.backends), inspect.getsource(dask_cudf.core)]
    assert not any("shuffle.method" in source for source in sources)


def is_compared_by_arrow(dtype):
    return type(dtype).__name__ in (
        "ListDtype",
        "Decimal32Dtype",
        "Decimal64Dtype",
        "Decimal128Dtype",
    )


class CudfSuite(FrameSuite):
    room = staticmethod(lambda nbytes: CudfMemory.empty(nbytes))

    def adapter(self, frame):
        return DeviceFrames(CudfTables(), frame.iloc[:0], "slot", True, self.room)

    def frame(self, rows, seed):
        rng = np.random.default_rng(seed)
        made = cudf.DataFrame({"slot": rng.integers(0, self.n_slots, rows)})
        return self.filled(made, rng, rows)

    def filled(self, made, rng, rows):
        raise NotImplementedError

    def rows_of(self, frame, slot):
        return frame[frame["slot"] == slot].drop(columns="slot")

    def joined(self, frames):
        return cudf.concat(frames)

    def assert_equal(self, got, expected):
        # cuDF's own comparison takes neither lists nor decimals.
        others = [name for name in expected if is_compared_by_arrow(expected[name].dtype)]
        cudf.testing.assert_frame_equal(got.drop(columns=others), expected.drop(columns=others))
        for name in others:
            assert got[name].dtype == expected[name].dtype
            assert got[name].to_arrow().equals(expected[name].to_arrow())


@needs_cudf
class TestNumbers(CudfSuite):
    def filled(self, made, rng, rows):
        made["a"] = rng.random(rows)
        made["b"] = rng.integers(0, 9, rows).astype("i1")
        made["c"] = rng.random(rows) > 0.5
        made["d"] = np.arange(rows).astype("M8[us]")
        made["e"] = np.arange(rows).astype("m8[ns]")
        made["maybe"] = cudf.Series(rng.random(rows)).where(cudf.Series(rng.random(rows) > 0.3))
        return made


@needs_cudf
class TestMixed(CudfSuite):
    modes = None if NO_CUDF else cudf.CategoricalDtype(["p", "q"], ordered=True)

    def joined(self, frames):
        # `concat` forgets that categories are ordered. The meta and stock Dask do not.
        return cudf.concat(frames).astype({"mode": self.modes})

    def filled(self, made, rng, rows):
        made["text"] = cudf.Series(list(rng.choice(["", "a", "bcd", None], rows)), dtype="str")
        made["mode"] = cudf.Series(list(rng.choice(["p", "q", None], rows)), dtype="str").astype(
            self.modes
        )
        made["list"] = cudf.Series(
            [[n] * (n % 3) for n in range(rows)], dtype=cudf.ListDtype("int32")
        )
        prices = cudf.Series(rng.integers(0, 99, rows))
        made["price"] = prices.astype(cudf.Decimal64Dtype(12, 2))
        made["large"] = prices.astype(cudf.Decimal128Dtype(30, 4))
        instants = cudf.Series(np.arange(rows).astype("M8[us]"))
        made["zone"] = instants.dt.tz_localize("UTC").dt.tz_convert("Europe/Berlin")
        made["Int64"] = cudf.Series(np.arange(rows)).astype("Int64")
        return made


@needs_cudf
class TestWithoutRoom(TestMixed):
    room = staticmethod(no_room)


@needs_cudf
class TestIndexed(CudfSuite):
    def filled(self, made, rng, rows):
        made["value"] = rng.random(rows)
        made["n"] = np.arange(rows)
        made["s"] = cudf.Series([f"r{i}" for i in range(rows)], dtype="str")
        return made.set_index(["n", "s"])


@needs_cudf
class TestNamedIndex(CudfSuite):
    def filled(self, made, rng, rows):
        made["value"] = rng.random(rows)
        made["key"] = cudf.Series([f"r{i}" for i in range(rows)], dtype="str")
        return made.set_index("key")


@needs_cudf
class TestOfASeries(CudfSuite):
    """A frame as Dask makes it of an unnamed Series: one column with a number as label."""

    def filled(self, made, rng, rows):
        made[0] = cudf.Series(list(rng.choice(["", "a", "bcd", None], rows)), dtype="str")
        return made


@needs_cudf
class TestCudf:
    def test_partitions_with_other_categories_are_joined(self):
        parts = [
            cudf.DataFrame({"slot": 0, "v": cudf.Series(values, dtype="category")})
            for values in (["a", "b"], ["b", "c"], ["c", "a"])
        ]
        adapter = DeviceFrames(CudfTables(), parts[0].iloc[:0], "slot", True, no_room)
        pieces = []
        for part in parts:
            (body,) = adapter.open(part).gather([Selection(np.arange(2), False)])
            pieces.append(Piece(body, 0, 2))
        got = adapter.concatenate(pieces)["v"]
        assert got.astype("str").to_arrow().to_pylist() == ["a", "b", "b", "c", "c", "a"]

    def test_missing_and_invalid_partition_numbers(self):
        from dask_gpurt.shuffle.plan import ExchangePlan

        plan = ExchangePlan({0: "a", 1: "b"})
        for numbers in ([0, 1, None, 7, 1], [0.0, 1.0, 0.5, -1.0, 1.0]):
            frame = cudf.DataFrame({"slot": numbers, "v": range(5)})
            adapter = DeviceFrames(CudfTables(), frame.iloc[:0], "slot", True, no_room)
            rows, before = adapter.open(frame).group(plan)
            assert cupy.asnumpy(rows).tolist() == [0, 1, 4]
            assert list(before) == [0, 1, 3]

    def test_structures_are_refused(self):
        frame = cudf.DataFrame({"slot": [0], "v": [{"a": 1}]})
        adapter = DeviceFrames(CudfTables(), frame.iloc[:0], "slot", True, no_room)
        with pytest.raises(TypeError, match="data of type struct cannot be shuffled"):
            adapter.open(frame)

    @pytest.mark.parametrize("has_room", [True, False])
    def test_shards_take_one_copy_and_no_wait_for_later_work(self, gate, monkeypatch, has_room):
        from dask_gpurt.frames.device import cudf_
        from dask_gpurt.shuffle.plan import ExchangePlan

        frame = cudf.DataFrame({"slot": np.arange(8000) % 2, "v": range(8000), "t": ["ab"] * 8000})
        room = CudfMemory.empty if has_room else no_room
        adapter = DeviceFrames(CudfTables(), frame.iloc[:0], "slot", True, room)
        plan = ExchangePlan({0: "a", 1: "b"})

        def shards(opened):
            rows, before = opened.group(plan)
            return opened.gather(
                [Selection(rows[a:b], True) for a, b in itertools.pairwise(before)]
            )

        before = rmm.mr.get_current_device_resource()
        # Without a pool, an allocation waits for the whole device.
        rmm.mr.set_current_device_resource(
            rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), 64 << 20)
        )
        try:
            shards(adapter.open(frame))  # compiles
            copied = []
            for name in ("copy_device_to_ptr", "copy_ptr_to_host"):
                call = getattr(cudf_, name)

                def counted(source, target, *more, call=call):
                    copied.append(target.nbytes if isinstance(target, np.ndarray) else more[0])
                    call(source, target, *more)

                monkeypatch.setattr(cudf_, name, counted)
            opened = adapter.open(frame)
            gate.close(types.SimpleNamespace(handle=cupy.cuda.Stream.null))
            made = shards(opened)
            is_waiting = not cupy.cuda.Stream.null.done
            gate.open()
            assert is_waiting
            # An index of 8 bytes a row, 8 of numbers, 2 of text and 4 of its offsets.
            assert sum(copied) == 8000 * (8 + 8 + 2 + 4) + 2 * 4
            bodies = [adapter.unpack(opened.layout_key, one) for one in made]
            got = adapter.concatenate([Piece(body, 0, 4000) for body in bodies])
            assert got["v"].to_arrow().to_pylist() == [*range(0, 8000, 2), *range(1, 8000, 2)]
            cupy.cuda.Stream.null.synchronize()
            del made, bodies, got, opened
        finally:
            gate.open()
            rmm.mr.set_current_device_resource(before)

    def test_contents_beyond_the_memory_are_refused(self):
        frame = cudf.DataFrame({"slot": 0, "v": range(100), "t": ["ab"] * 100})
        adapter = DeviceFrames(CudfTables(), frame.iloc[:0], "slot", True, no_room)
        opened = adapter.open(frame)
        (packed,) = opened.gather([Selection(np.arange(100), True)])
        cut = on_host(packed).buffer[64:]
        with pytest.raises(ValueError):
            adapter.unpack(opened.layout_key, Packed(cut, 100, 0, packed.pickle_nbytes))


@needs_gpu
@pytest.mark.parametrize("kind", [pytest.param("cudf", marks=needs_cudf), "cupy"])
class TestMemory:
    def made(self, kind, nbytes):
        return CudfMemory.empty(nbytes) if kind == "cudf" else CupyMemory.empty(nbytes)

    def test_device_memory_has_an_interface_and_can_be_copied(self, kind):
        memory = self.made(kind, 1000)
        assert memory.nbytes == len(memory) == 1000
        cupy.asarray(memory)[:] = cupy.arange(1000).astype(np.uint8)
        cupy.cuda.get_current_stream().synchronize()
        out = np.empty(10, np.uint8)
        memory.copy_to_host(out, 20)
        assert out.tolist() == list(range(20, 30))
        with pytest.raises(IndexError):
            memory.copy_to_host(out, 991)

    def test_oversized_allocation_is_refused(self, kind):
        budget = DeviceBudget(1 << 60)
        assert budget.take(partial(self.made, kind), 1 << 50) is None
        assert budget.used_nbytes == 0


@needs_gpu
@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
def test_cupy_arrays_are_cut_and_joined(order, leaves, has_room):
    # This import needs distributed.
    blocks = pytest.importorskip("tests.frames.chunks.test_rechunking").blocks
    old, new = ((4, 4), (9,)), ((8,), (2, 2, 5))
    whole = np.random.default_rng(1).random((8, 9))
    room = CupyMemory.empty if has_room else no_room
    arrays = Arrays(Rechunking(old, new), None, {"cupy.ndarray": lambda: CupyArrays(room)})
    pieces: dict[Any, list[Piece]] = {}
    for index, chunk in blocks(whole, old).items():
        opened = arrays.open(cupy.asarray(chunk, order=order), index)
        made = opened.cut(opened.parts, leaves)
        body = arrays.unpack(opened.layout_key, made) if leaves else made
        assert body.packed.is_on_device == has_room
        before = 0
        for part in opened.parts:
            piece = Piece(body, before, before + part.n_rows)
            pieces.setdefault(part.output, []).append(piece)
            before += part.n_rows
    for index, want in blocks(whole, new).items():
        got = arrays.concatenate(index, pieces[index])
        assert type(got) is cupy.ndarray
        np.testing.assert_array_equal(cupy.asnumpy(got), want)


@pytest.fixture
def client():
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    local = distributed.LocalCluster(
        processes=False, protocol="tcp://", silence_logs=False, **options
    )
    with local, distributed.Client(local, set_as_default=False) as client:
        yield client


@needs_cudf
@pytest.mark.parametrize("transport", ["auto", "ucx", "comm"])
def test_shuffling_dask_cudf_equals_stock(client, transport):
    import dask
    import dask_cudf

    import dask_gpurt

    rng = np.random.default_rng(0)
    frame = cudf.DataFrame(
        {
            "key": rng.integers(0, 1000, 200_000),
            "x": rng.random(200_000),
            "name": cudf.Series(list(rng.choice(["a", "bb", None], 200_000)), dtype="str"),
        }
    )

    def shuffled():
        with client.as_current():
            lazy = dask_cudf.from_cudf(frame, npartitions=6).shuffle("key", npartitions=4)
            return client.gather(client.compute(lazy.to_delayed()))

    expected = shuffled()
    with dask.config.set({"gpurt.shuffle.transport": transport}):
        dask_gpurt.enable(client)
    got = shuffled()
    assert dask_gpurt.status(client)["runs"] == {"gpurt": 1, "stock": 0}
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one, cudf.DataFrame)
        cudf.testing.assert_frame_equal(one, other)


@needs_cudf
@pytest.mark.parametrize("dtype", ["int64", "float32", "str", "category", "datetime64[us]"])
def test_shuffling_a_dask_cudf_series_equals_stock(client, dtype):
    """Compared with stock's shuffle by tasks, which may keep another of equal rows.

    Stock's P2P names the index `index`, and fails for categories.
    """
    import dask_cudf

    import dask_gpurt

    numbers = cudf.Series(np.random.default_rng(0).integers(0, 100, 20_000), name="x")
    series = (numbers.astype("str") if dtype == "category" else numbers).astype(dtype)

    def unique(method):
        with client.as_current():
            lazy = dask_cudf.from_cudf(series, npartitions=6)
            lazy = lazy.drop_duplicates(split_out=4, shuffle_method=method)
            return client.gather(client.compute(lazy.to_delayed()))

    expected = unique("tasks")
    dask_gpurt.enable(client)
    got = unique("p2p")
    assert dask_gpurt.status(client)["runs"] == {"gpurt": 1, "stock": 0}
    for one, other in zip(got, expected, strict=True):
        assert isinstance(one, cudf.Series)
        assert one.index.name is other.index.name is None
        sides = [side.astype("str") if dtype == "category" else side for side in (one, other)]
        ordered = [side.sort_values().reset_index(drop=True) for side in sides]
        assert one.dtype == other.dtype
        cudf.testing.assert_series_equal(*ordered)


@needs_gpu
def test_a_rechunk_of_cupy_arrays_stays_on_the_device(client):
    import dask
    import dask.array as da

    import dask_gpurt

    dask_gpurt.enable(client)
    whole = np.arange(1_000_000.0).reshape(1000, 1000)
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        lazy = da.from_array(whole, chunks=(100, 1000)).map_blocks(cupy.asarray)
        chunks = client.gather(
            client.compute(lazy.rechunk((1000, 200)).to_delayed().ravel().tolist())
        )
    for number, chunk in enumerate(chunks):
        assert type(chunk) is cupy.ndarray
        want = whole[:, 200 * number : 200 * (number + 1)]
        np.testing.assert_array_equal(cupy.asnumpy(chunk), want)
    assert dask_gpurt.status(client)["runs"] == {"gpurt": 1, "stock": 0}
