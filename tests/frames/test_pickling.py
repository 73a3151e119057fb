"""Objects that leave a process are pickled as rarely as possible; errors name the object."""

from __future__ import annotations

import datetime
import decimal
import enum
import pickle
import threading

import numpy as np
import pandas as pd
import pytest
from dask.array.core import concatenate3
from distributed.protocol.pickle import dumps, loads

from dask_gpurt.frames.adapter import Piece, Selection
from dask_gpurt.frames.chunks.arrays import Arrays
from dask_gpurt.frames.chunks.rechunking import Rechunking
from dask_gpurt.frames.columns import Categories, compose_categorical, decompose
from dask_gpurt.frames.gather import RowCounts
from dask_gpurt.frames.layouts import FrameLayout
from dask_gpurt.frames.pandas_ import PandasFrames
from dask_gpurt.frames.pickling import Pickling

N_ROWS = 1000
DASKS = Pickling(dumps, loads)


class Counted(Pickling):
    """A plain pickle that records its inputs."""

    def __init__(self):
        self.dumped = []

        def noted(value, **options):
            self.dumped.append(value)
            return pickle.dumps(value, **options)

        super().__init__(noted, pickle.loads)

    __setattr__ = object.__setattr__


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Unreadable:
    def __reduce__(self):
        return pickle.loads, (b"not a pickle",)


def column(values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return pd.Series(array, dtype=object)


def opened(values, pickling=None, **more):
    frame = pd.DataFrame({"slot": np.zeros(len(values), "i8"), "v": column(values), **more})
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True, pickling=pickling)
    return adapter, adapter.open(frame)


def gathered(partition, n_rows, *, leaves):
    (shard,) = partition.gather([Selection(np.arange(n_rows), leaves)])
    return shard


@pytest.mark.parametrize(
    "value",
    [
        "text", 7, 1.5, None, b"bytes", True, 2j, decimal.Decimal("1.5"),
        datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), pd.Timestamp("2020"), pd.NA,
        pd.NaT, np.int8(1), np.float64(1.5), np.str_("text"),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)  # fmt: skip
def test_plain_objects_are_pickled_once_and_only_when_sent(value):
    pickling = Counted()
    _, partition = opened([value] * N_ROWS, pickling)
    gathered(partition, N_ROWS, leaves=False)
    assert pickling.dumped == []
    gathered(partition, N_ROWS, leaves=True)
    (dumped,) = pickling.dumped
    assert [len(values) for values in dumped] == [N_ROWS]


def test_sample_of_other_objects_is_pickled_at_once():
    pickling = Counted()
    _, partition = opened([[j] for j in range(N_ROWS)], pickling)
    (tried,) = pickling.dumped
    assert len(tried) <= 100
    gathered(partition, N_ROWS, leaves=True)
    assert len(pickling.dumped) == 2


@pytest.mark.parametrize("place", [0, 13, N_ROWS - 1])
def test_an_unpicklable_object_is_found_at_any_position(place):
    values = [[j] for j in range(N_ROWS)]
    values[place] = threading.Lock()
    with pytest.raises(TypeError, match=r"column 'v' cannot be sent.*_thread\.lock"):
        opened(values)


def test_the_error_names_the_column_among_several():
    locked = [[j] for j in range(N_ROWS)]
    # Not part of the sample.
    locked[1] = [threading.Lock()]
    _, partition = opened(["text"] * N_ROWS, w=column(locked))
    gathered(partition, N_ROWS, leaves=False)
    with pytest.raises(TypeError, match=r"column 'w' cannot be sent.*_thread\.lock"):
        gathered(partition, N_ROWS, leaves=True)


def test_errors_distinguish_columns_of_one_name():
    frame = pd.DataFrame([[0, threading.Lock(), 1]], columns=["slot", "v", "v"]).astype(object)
    frame = frame.astype({"slot": "i8"})
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    with pytest.raises(TypeError, match="column 'v \\(column 0\\)' cannot be sent"):
        adapter.open(frame)


def test_the_index_is_named_in_its_error():
    frame = pd.DataFrame({"slot": [0]}, index=pd.Index([threading.Lock()]))
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    with pytest.raises(TypeError, match="index level 0 cannot be sent"):
        adapter.open(frame)


def test_the_name_of_an_index_is_named_in_its_error():
    frame = pd.DataFrame({"slot": [0]}, index=pd.Index([1], name=threading.Lock()))
    adapter = PandasFrames(frame.iloc[:0], "slot", drop_column=True)
    with pytest.raises(TypeError, match=r"the name of index level 0, <unlocked.*cannot be sent"):
        adapter.open(frame)


def test_column_of_unpicklable_categories_is_named():
    values = pd.Categorical([threading.Lock()])
    frame = pd.DataFrame({"slot": [0], "v": values})
    adapter = PandasFrames(frame.iloc[:0].astype({"v": object}), "slot", drop_column=True)
    with pytest.raises(TypeError, match="column 'v' cannot be sent"):
        adapter.open(frame)


def test_unpickling_errors_name_the_column():
    adapter, partition = opened([Unreadable()], w=["text"])
    packed = gathered(partition, 1, leaves=True)
    with pytest.raises(pickle.UnpicklingError) as caught:
        adapter.unpack(partition.layout_key, packed)
    (note,) = caught.value.__notes__
    assert "column 'v'" in note


@pytest.mark.parametrize("name", [None, "x", "ü" * 300, 7, 1 << 70, 1.5, True, ("a", 1), Level.LOW])
def test_names_of_an_index_are_restored(name):
    layout = FrameLayout((), (decompose(np.arange(3)).layout,), (name,), DASKS)
    (back,) = FrameLayout.from_key(layout.key, DASKS).index_names
    assert (back, type(back)) == (name, type(name))


@pytest.mark.parametrize(
    "labels",
    [list(Level), [1, np.int64(2)], [np.str_("a"), "b"], [b"a", None]],
    ids=["IntEnum", "numbers", "texts", "missing"],
)
def test_categories_keep_the_types_of_their_objects(labels):
    categories = pd.Index([label for label in labels if label is not None], dtype=object)
    values = pd.Categorical.from_codes(range(len(categories)), categories)
    taken = decompose(values, pickling=DASKS)
    back = Categories(DASKS).of(taken.layout, None)
    assert list(map(type, back)) == list(map(type, categories))
    assert back.equals(categories)


def test_equal_categories_of_another_type_are_sent():
    numbers = pd.CategoricalDtype(pd.Index([1, 2], dtype=object))
    levels = pd.Categorical.from_codes([0, 1], pd.Index(list(Level), dtype=object))
    taken = decompose(levels, numbers, DASKS)
    dtype = pd.CategoricalDtype(Categories(DASKS).of(taken.layout, numbers))
    (codes,) = taken.parts
    assert not isinstance(codes, RowCounts)
    assert list(map(type, compose_categorical(codes, dtype))) == [Level, Level]


def test_categories_are_read_once_a_run():
    read = []

    def noted(data, **options):
        read.append(data)
        return loads(data, **options)

    levels = pd.Categorical.from_codes([0, 1], pd.Index(list(Level), dtype=object))
    layout = decompose(levels, pickling=DASKS).layout
    categories = Categories(Pickling(dumps, noted))
    assert categories.of(layout, None) is categories.of(layout, None)
    assert len(read) == 1


def rechunked(values, pickling, *, leaves):
    arrays = Arrays(Rechunking(((len(values),),), ((1, len(values) - 1),)), concatenate3,
                    pickling=pickling)  # fmt: skip
    chunk = arrays.open(column(values).to_numpy(), (0,))
    return arrays, chunk, chunk.cut(chunk.parts, leaves)


def test_functions_in_a_chunk_are_sent():
    values = [lambda n=n: n for n in range(3)]
    arrays, chunk, packed = rechunked(values, DASKS, leaves=True)
    body = arrays.unpack(chunk.layout_key, packed)
    joined = arrays.concatenate((1,), [Piece(body, 1, 2)])
    assert [one() for one in joined] == [1, 2]


@pytest.mark.parametrize("leaves", [True, False])
def test_an_unpicklable_chunk_is_always_refused(leaves):
    with pytest.raises(TypeError, match=r"chunk \(0,\) of an array cannot be sent"):
        rechunked([threading.Lock(), 1], DASKS, leaves=leaves)
