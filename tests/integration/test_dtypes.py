"""Shuffles and merges of all dtypes and indexes equal those of plain Dask."""

from __future__ import annotations

import datetime
import decimal
import enum

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tests.integration.comparing import assert_same_as_stock, collection, on_our_plane, partitions

N = 60
N_PARTITIONS = 4


def frames(column=None, index=None):
    made = []
    for i in range(N_PARTITIONS):
        rng = np.random.default_rng(i)
        frame = pd.DataFrame({"key": rng.integers(0, 20, N), "origin": i * N + np.arange(N)})
        if column is not None:
            frame["value"] = column(rng, i)
        if index is not None:
            frame = frame.set_index(index(rng, i))
        made.append(frame)
    return made


def maybe(rng, value, dtype):
    return pd.array(np.where(rng.random(N) > 0.5, value, None), dtype=dtype)


def arrow(values, type_):
    return pd.Series(values, dtype=pd.ArrowDtype(type_))


def objects(values):
    return pd.Series(values, dtype=object)


#: Columns for which stock Dask and the runtime give equal results.
LIKE_STOCK = {
    "int8": lambda rng, i: rng.integers(0, 9, N).astype("i1"),
    "uint64": lambda rng, i: rng.integers(0, 9, N).astype("u8"),
    "float16": lambda rng, i: rng.random(N).astype("f2"),
    "float32": lambda rng, i: rng.random(N).astype("f4"),
    "bool": lambda rng, i: rng.random(N) > 0.5,
    "datetime ns": lambda rng, i: pd.date_range("2020", periods=N, unit="ns"),
    "datetime s": lambda rng, i: pd.date_range("2020", periods=N, unit="s"),
    "datetime zone": lambda rng, i: pd.date_range("2020", periods=N, tz="Europe/Paris"),
    "datetime offset": lambda rng, i: pd.date_range(
        "2020", periods=N, tz=datetime.timezone(datetime.timedelta(hours=2))
    ),
    "timedelta": lambda rng, i: pd.to_timedelta(np.arange(N), unit="s"),
    "period": lambda rng, i: pd.period_range("2020", periods=N, freq="M"),
    "interval": lambda rng, i: pd.interval_range(0, N),
    "interval of datetimes": lambda rng, i: pd.interval_range(pd.Timestamp("2020"), periods=N),
    "categorical": lambda rng, i: pd.Categorical(rng.choice(["a", "b"], N), list("abc")),
    "categorical ordered": lambda rng, i: pd.Categorical(
        rng.choice(["a", "b"], N), ["b", "a"], ordered=True
    ),
    "categorical missing": lambda rng, i: pd.Categorical(np.where(rng.random(N) > 0.5, "a", None)),
    "categorical of datetimes": lambda rng, i: pd.Categorical(pd.date_range("2020", periods=N)),
    "Int64": lambda rng, i: maybe(rng, 1, "Int64"),
    "boolean": lambda rng, i: maybe(rng, True, "boolean"),
    "Float32": lambda rng, i: maybe(rng, 1.5, "Float32"),
    "str": lambda rng, i: pd.array(rng.choice(["aa", "b", None], N), dtype="str"),
    "string python": lambda rng, i: pd.array(rng.choice(["aa", "b"], N), dtype="string[python]"),
    "string pyarrow": lambda rng, i: maybe(rng, "q", "string[pyarrow]"),
    "arrow timestamp": lambda rng, i: arrow(
        pd.date_range("2020", periods=N), pa.timestamp("us", tz="UTC")
    ),
    "arrow bool": lambda rng, i: arrow([True, None] * (N // 2), pa.bool_()),
    "arrow date": lambda rng, i: arrow([datetime.date(2020, 1, 1)] * N, pa.date32()),
    "object int": lambda rng, i: objects(list(range(N))),
    "object str": lambda rng, i: objects(["a"] * N),
    "object date": lambda rng, i: objects([datetime.date(2020, 1, 1)] * N),
    "object decimal": lambda rng, i: objects([decimal.Decimal("1.5")] * N),
    "object dict": lambda rng, i: objects([{"a": 1}] * N),
    "object bytes": lambda rng, i: objects([b"a"] * N),
    "object bool or none": lambda rng, i: objects([True, None] * (N // 2)),
    # Partitions that disagree with the meta, or with one another.
    "int among float": lambda rng, i: rng.integers(0, 9, N) if i % 2 else rng.random(N),
    "float among int": lambda rng, i: rng.random(N) if i % 2 else rng.integers(0, 9, N),
    "int of two widths": lambda rng, i: rng.integers(0, 9, N).astype("i4" if i % 2 else "i8"),
    "none among str": lambda rng, i: objects([None] * N) if i == 1 else pd.array(["a"] * N, "str"),
    "none among categories": lambda rng, i: (
        objects([None] * N) if i == 1 else pd.Categorical(rng.choice(["a", "b"], N))
    ),
    "none among float32": lambda rng, i: (
        objects([None] * N) if i == 1 else rng.random(N).astype("f4")
    ),
    "none among datetime s": lambda rng, i: (
        objects([None] * N) if i == 1 else pd.date_range("2020", periods=N, unit="s")
    ),
    "object among str": lambda rng, i: objects(["q"] * N) if i else pd.array(["a"] * N, "str"),
    "datetime of two units": lambda rng, i: pd.date_range(
        "2020", periods=N, unit="ns" if i % 2 else "s"
    ),
    "object among bool": lambda rng, i: (
        objects([True, None] * (N // 2)) if i == 1 else rng.random(N) > 0.5
    ),
}

#: Columns that stock Dask refuses or changes, but that the runtime leaves unchanged.
AS_SENT = {
    "complex": lambda rng, i: rng.random(N) + 1j,
    "sparse": lambda rng, i: pd.arrays.SparseArray(rng.integers(0, 2, N)),
    "object mixed": lambda rng, i: objects(["a", 1] * (N // 2)),
    "object str or none": lambda rng, i: objects(["a", None] * (N // 2)),
    "object list": lambda rng, i: objects([[1, 2]] * N),
    "arrow decimal": lambda rng, i: arrow([decimal.Decimal("1.5")] * N, pa.decimal128(10, 2)),
    "arrow list": lambda rng, i: arrow([[1, 2], None] * (N // 2), pa.list_(pa.int64())),
    "arrow struct": lambda rng, i: arrow([{"a": 1}] * N, pa.struct([("a", pa.int64())])),
    "arrow dictionary": lambda rng, i: arrow(
        ["a", "b"] * (N // 2), pa.dictionary(pa.int32(), pa.string())
    ),
    "categorical of intervals": lambda rng, i: pd.Categorical(pd.interval_range(0, N)),
    "arrow string": lambda rng, i: pd.array(
        [*"abc", None] * (N // 4), dtype=pd.ArrowDtype(pa.string())
    ),
    "categorical of strings with NA": lambda rng, i: pd.Categorical(
        pd.array([*"abc", None] * (N // 4), dtype="string[pyarrow]")
    ),
    "categorical of datetimes with a zone": lambda rng, i: pd.Categorical(
        pd.date_range("2020", periods=N, tz="Asia/Tokyo")
    ),
}

INDEXES = {
    "named": lambda rng, i: pd.Index(np.arange(N), name="number"),
    "duplicate": lambda rng, i: pd.Index(np.zeros(N, dtype=int)),
    "steps": lambda rng, i: pd.RangeIndex(5, 5 + 3 * N, 3),
    "backwards": lambda rng, i: pd.RangeIndex(N, 0, -1),
    "str": lambda rng, i: pd.Index([f"r{j}" for j in range(N)], name="s"),
    "datetime": lambda rng, i: pd.date_range("2020", periods=N, name="when"),
    "datetime zone": lambda rng, i: pd.date_range("2020", periods=N, tz="UTC"),
    "categorical": lambda rng, i: pd.CategoricalIndex(["a", "b"] * (N // 2)),
    "float": lambda rng, i: pd.Index(rng.random(N)),
    "bool": lambda rng, i: pd.Index(rng.random(N) > 0.5),
    "timedelta": lambda rng, i: pd.to_timedelta(np.arange(N)),
    "multi": lambda rng, i: pd.MultiIndex.from_arrays([np.arange(N), ["z"] * N], names=["p", "q"]),
}

#: Indexes whose type or name stock Dask changes.
INDEXES_AS_SENT = {
    "object": lambda rng, i: pd.Index([f"r{j}" for j in range(N)], dtype=object),
    "period": lambda rng, i: pd.period_range("2020", periods=N, freq="D"),
    "interval": lambda rng, i: pd.interval_range(0, N),
    "Int64": lambda rng, i: pd.Index(pd.array([1] * N, dtype="Int64")),
    "string with NA": lambda rng, i: pd.Index([f"r{j}" for j in range(N)], dtype="string[pyarrow]"),
    "tuple as name": lambda rng, i: pd.Index(np.arange(N), name=("a", 1)),
    "integer as name": lambda rng, i: pd.Index(np.arange(N), name=5),
}


@pytest.fixture(autouse=True)
def strings_stay_as_they_are():
    with dask.config.set({"dataframe.convert-string": False}):
        yield


def assert_as_sent(sides, sent):
    """Check that each row arrived once, unchanged, in order, and in its key's partition."""
    got = on_our_plane(sides, collection(sent).shuffle("key", npartitions=5), 1)
    source = pd.concat(sent)
    # `concat` turns an index of objects that are all strings into one of strings.
    source.index = source.index.astype(sent[0].index.dtype)
    for part in got:
        assert part["origin"].is_monotonic_increasing
        pd.testing.assert_frame_equal(part, source[source["origin"].isin(part["origin"])])
    assert sum(map(len, got)) == sum(map(len, sent))
    keys = [set(part["key"]) for part in got]
    assert sum(map(len, keys)) == len(set().union(*keys))


@pytest.mark.share(3)
@pytest.mark.parametrize("name", LIKE_STOCK)
def test_column_type_equals_dask(sides, name):
    lazy = collection(frames(LIKE_STOCK[name])).shuffle("key", npartitions=5)
    assert_same_as_stock(sides, lazy, 1)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", INDEXES)
def test_index_type_equals_dask(sides, name):
    lazy = collection(frames(index=INDEXES[name])).shuffle("key", npartitions=5)
    assert_same_as_stock(sides, lazy, 1)


@pytest.mark.parametrize("name", AS_SENT)
def test_column_type_is_kept_as_sent(sides, name):
    assert_as_sent(sides, frames(AS_SENT[name]))


@pytest.mark.parametrize("name", INDEXES_AS_SENT)
def test_index_type_is_kept_as_sent(sides, name):
    assert_as_sent(sides, frames(index=INDEXES_AS_SENT[name]))


def side_by_side(columns):
    """Return a collection's partitions with all of these columns."""
    made = {name: frames(column) for name, column in columns.items()}
    return [
        frame.assign(**{name: parts[i]["value"] for name, parts in made.items()})
        for i, frame in enumerate(frames())
    ]


def test_column_types_survive_ucx(over_ucx):
    """All columns are in one shuffle, because for UCX a shard is only bytes."""
    lazy = collection(side_by_side(LIKE_STOCK)).shuffle("key", npartitions=5)
    assert_same_as_stock(over_ucx, lazy, 1)
    assert_as_sent(over_ucx, side_by_side(AS_SENT))


def test_index_types_survive_ucx(over_ucx):
    for index in (INDEXES | INDEXES_AS_SENT).values():
        assert_as_sent(over_ucx, frames(index=index))


@pytest.mark.parametrize("ordered", [False, True])
def test_categories_are_united_in_the_order_of_the_input(sides, ordered):
    """Stock Dask unites them in the order in which shards happen to arrive."""
    sent = frames(lambda rng, i: pd.Categorical(rng.choice([f"x{i}", "y"], N), ordered=ordered))
    got = on_our_plane(sides, collection(sent).shuffle("key", npartitions=3), 1)
    for part in got:
        source = pd.concat([f.assign(value=f["value"].astype(str)) for f in sent])
        source = source[source["origin"].isin(part["origin"])]
        assert part["value"].astype(str).tolist() == source["value"].tolist()
        assert part["value"].dtype.ordered == ordered
        order = [c for c in ["x0", "y", "x1", "x2", "x3"] if c in set(part["value"].cat.categories)]
        assert part["value"].cat.categories.tolist() == order


def test_nullable_numbers_keep_the_type_of_the_meta(sides):
    """Stock Dask uses the type of the shard that happens to arrive first."""
    sent = frames(lambda rng, i: pd.Series(rng.integers(0, 9, N), dtype="Int64" if i % 2 else "i8"))
    sent[3].loc[sent[3]["key"] == 0, "value"] = pd.NA
    got = on_our_plane(sides, collection(sent).shuffle("key", npartitions=5), 1)
    whole = pd.concat(sent).set_index("origin")["value"]
    for part in got:
        assert part["value"].dtype == ("Int64" if 0 in set(part["key"]) else "int64")
        assert part["value"].astype("Int64").equals(whole[part["origin"]].set_axis(part.index))


def test_unknown_categories_are_shuffled(sides):
    """As after `astype("category")`, the meta does not know the categories."""
    lazy = collection(frames(lambda rng, i: rng.choice(["a", "b"], N)))
    lazy = lazy.assign(value=lazy["value"].astype("category"))
    assert_same_as_stock(sides, lazy.shuffle("key", npartitions=3), 1)


class Label(enum.Enum):
    LEFT = 1


#: Column names of two frames to merge. Both frames have the first name.
COLUMN_NAMES = {
    "two levels": ([("oil", "lo"), ("oil", "hi"), ("tea", "lo")], [("oil", "lo"), ("ore", "x")]),
    "three levels": ([("a", "b", "c"), ("a", "b", "d")], [("a", "b", "c"), ("p", "q", "r")]),
    "levels of mixed types": ([("oil", 1), ("oil", 2), (3, "lo")], [("oil", 1), ("z", 5)]),
    "integers": ([0, 1, 2], [0, 7]),
    "a tuple": (["a", ("b", 1)], ["a", "w"]),
    "an Enum": (["a", Label.LEFT], ["a", "w"]),
    "timestamps": (
        [pd.Timestamp("2020"), pd.Timestamp("2021")],
        [pd.Timestamp("2020"), pd.Timestamp("2022")],
    ),
}


def with_names(names, rows, *, level_names=None):
    if all(isinstance(name, tuple) for name in names):
        columns = pd.MultiIndex.from_tuples(names, names=level_names)
    else:
        columns = pd.Index(names, tupleize_cols=False)
    return pd.DataFrame(np.multiply.outer(rows, np.arange(1, len(names) + 1)), columns=columns)


def lazy_of(frame):
    return dd.from_pandas(frame, npartitions=3, sort=False)


def assert_equals_pandas(sides, lazy, expected, *, has_index=True):
    """Compare with pandas, ignoring the order of rows."""
    both = [pd.concat(on_our_plane(sides, lazy)), expected]
    both = [frame.sort_values(list(frame.columns)) for frame in both]
    if not has_index:
        both = [frame.reset_index(drop=True) for frame in both]
    pd.testing.assert_frame_equal(*both)


@pytest.mark.share(3)
@pytest.mark.parametrize("how", ["inner", "outer"])
@pytest.mark.parametrize("name", COLUMN_NAMES)
def test_merge_accepts_column_names_that_dask_refuses(sides, name, how):
    left, right = COLUMN_NAMES[name]
    one, other = with_names(left, np.arange(N) % 11), with_names(right, np.arange(11))
    on = [left[0]]
    lazy = lazy_of(one).merge(lazy_of(other), on=on, how=how, broadcast=False)
    assert_equals_pandas(sides, lazy, one.merge(other, on=on, how=how), has_index=False)
    with pytest.raises((RuntimeError, KeyError)):
        partitions(sides.stock, lazy)


@pytest.mark.parametrize(
    "names", [["key", 5], ["key", ("a", 1)], ["key", "x", "x"]], ids=["integer", "tuple", "twice"]
)
def test_set_index_keeps_other_names_of_columns(sides, names):
    frame = with_names(names, np.random.default_rng(0).permutation(N))
    lazy = lazy_of(frame).set_index("key")
    found = pd.concat(on_our_plane(sides, lazy))
    pd.testing.assert_frame_equal(found, frame.set_index("key").sort_index())
    with pytest.raises(RuntimeError, match="P2P"):
        partitions(sides.stock, lazy)


@pytest.mark.parametrize("level_names", [None, ["kind", "which"]], ids=["", "named"])
def test_join_keeps_two_levels_of_columns(sides, level_names):
    """The frames are joined on their indexes, which have different orders."""
    rows = np.random.default_rng(0).permutation(N)
    left = with_names([("oil", "lo"), ("oil", "hi")], np.arange(N), level_names=level_names)
    right = with_names([("ore", "x"), ("tea", "lo")], rows, level_names=level_names)
    left, right = left.set_index(pd.Index(rows, name="ship")), right.rename_axis("ship")
    lazy = lazy_of(left).merge(
        lazy_of(right), left_index=True, right_index=True, how="left", broadcast=False
    )
    expected = left.merge(right, left_index=True, right_index=True, how="left")
    assert_equals_pandas(sides, lazy, expected)


def test_column_levels_lose_the_partition_column(sides):
    names = [("oil", "lo"), ("tea", "lo")]
    one, other = with_names(names, np.arange(N)), with_names([names[0], ("ore", "x")], np.arange(9))
    lazy = lazy_of(one).merge(lazy_of(other), on=[names[0]], broadcast=False)
    for part in on_our_plane(sides, lazy):
        assert "__hash_partition" not in part.columns.levels[0]


@pytest.mark.parametrize("name", ["what", ("a", 1), Label.LEFT], ids=str)
def test_the_name_of_the_columns_is_kept(sides, name):
    sent = frames()
    for frame in sent:
        frame.columns.name = name
    lazy = collection(sent).shuffle("key", npartitions=5)
    assert {part.columns.name for part in on_our_plane(sides, lazy, 1)} == {name}
    assert {part.columns.name for part in partitions(sides.stock, lazy)} == {None}
