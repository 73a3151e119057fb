"""A script that shuffles objects of its own classes, for `test_own_classes`.

It prints a line for each case, with its name and outcome. The outcome is `as sent` if every object
arrived with its value and its type. The environment variable `N_WORKERS` has the number of workers.
"""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import os
import sys
import threading

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.delayed import delayed
from distributed import Client, LocalCluster

import dask_gpurt

N_ROWS, N_PARTITIONS = 20, 3


class Kind(enum.IntEnum):
    A = 1
    B = 2


class Tone(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


class Color(enum.Enum):
    RED = 1
    BLUE = 2
    GREEN = 3


Point = collections.namedtuple("Point", "x y")


class Price(decimal.Decimal):
    pass


class Bag(dict):
    pass


class Name(str):
    pass


@dataclasses.dataclass(frozen=True, order=True)
class Box:
    value: int


class Plain:
    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return f"Plain({self.value})"


def local_class():
    class Local(str):
        pass

    return Local


Local = local_class()


def column(values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return pd.Series(array, dtype=object)


def frames(make=lambda i: {}, change=lambda frame: None):
    made = []
    for i in range(N_PARTITIONS):
        first = i * N_ROWS
        frame = pd.DataFrame({"k": np.arange(N_ROWS) % 5, "n": first + np.arange(N_ROWS)})
        frame = frame.assign(**make(i))
        change(frame)
        made.append(frame)
    return made


def objects(make):
    return lambda: frames(lambda i: {"v": column([make(j) for j in range(N_ROWS)])})


def categories(values):
    """Make frames with a categorical column; every other partition has one category less."""

    def make(i):
        mine = values[: len(values) - i % 2]
        chosen = column([mine[j % len(mine)] for j in range(N_ROWS)])
        return {"v": pd.Categorical(chosen, categories=pd.Index(column(mine)))}

    return lambda: frames(make)


def name_index(frame):
    frame.index.name = Color.RED


def index_of_objects(frame):
    frame.index = pd.Index(column([Box(n) for n in frame.n]))


def index_of_levels(frame):
    levels = [frame.n, column([list(Color)[n % 3] for n in frame.n])]
    frame.index = pd.MultiIndex.from_arrays(levels, names=[Color.RED, "q"])


def name_columns(frame):
    frame.columns.name = Color.GREEN


CASES = {
    "IntEnum": objects(lambda j: list(Kind)[j % 2]),
    "StrEnum": objects(lambda j: list(Tone)[j % 2]),
    "Enum": objects(lambda j: list(Color)[j % 3]),
    "namedtuple": objects(lambda j: Point(1, j)),
    "Decimal": objects(Price),
    "dict": objects(lambda j: Bag(a=j)),
    "str": objects(Name),
    "dataclass": objects(Box),
    "plain class": objects(Plain),
    "in lists": objects(lambda j: [{"a": Box(j)}]),
    "function": objects(lambda j: lambda: j),
    "class of a function": objects(Local),
    "class": objects(lambda j: Box),
    "categories of Enum": categories(list(Color)),
    "categories of IntEnum": categories(list(Kind)),
    "categories of str": categories([Name(j) for j in range(3)]),
    "name of the index": lambda: frames(change=name_index),
    "index": lambda: frames(change=index_of_objects),
    "index of levels": lambda: frames(change=index_of_levels),
    "name of the columns": lambda: frames(change=name_columns),
}

#: Objects that cannot be pickled, so they are made on a worker.
UNSENDABLE = {
    "lock": lambda n: threading.Lock(),
    "a lock among numbers": lambda n: threading.Lock() if n == 13 else int(n),
    "lock in a dict": lambda n: {"a": threading.Lock()},
    "generator": lambda n: (n for _ in range(1)),
}


def collection(parts):
    lazy = [delayed(lambda frame: frame)(part) for part in parts]
    return dd.from_delayed(lazy, meta=parts[0].iloc[:0], verify_meta=False)


def shown(value):
    if type(value).__name__ == "function":
        value = value()
    return f"{type(value).__qualname__} {value!r}"


def summary(frame):
    """List everything in a frame that shows its objects, as text."""
    frame = frame.iloc[np.argsort(frame.n.to_numpy())]
    columns = [frame.iloc[:, position] for position in range(frame.shape[1])]
    return [
        [shown(one) for one in (*frame.columns, frame.columns.name, *frame.index.names)],
        [shown(one) for one in frame.index],
        *[[shown(one) for one in values] for values in columns],
        *[
            sorted(shown(one) for one in values.cat.categories)
            for values in columns
            if isinstance(values.dtype, pd.CategoricalDtype)
        ],
    ]


def expected_of(parts):
    """Concatenate partitions and unite categories, which pandas would turn into objects."""
    if "v" not in parts[0] or parts[0].v.dtype != "category":
        return pd.concat(parts)
    united = pd.api.types.union_categoricals([part.v for part in parts])
    return pd.concat([part.drop(columns="v") for part in parts]).assign(v=united)


def shuffles():
    for name, make in CASES.items():
        yield name, collection(make()).shuffle("k", npartitions=N_PARTITIONS), expected_of(make())
    boxes = CASES["dataclass"]()
    other = pd.DataFrame({"k": np.arange(5), "w": column([Name(j) for j in range(5)])})
    merged = collection(boxes).merge(dd.from_pandas(other, npartitions=2), on="k", broadcast=False)
    merged = merged.map_partitions(lambda frame: frame.set_index("n", drop=False))
    yield "merge", merged, pd.concat(boxes).merge(other, on="k").set_index("n", drop=False)
    by_number = collection(boxes).assign(m=lambda frame: -frame.n).set_index("m")
    yield "set_index", by_number, pd.concat(boxes).assign(m=lambda frame: -frame.n).set_index("m")


def cause_of(error):
    while error.__cause__ is not None and not isinstance(error, TypeError):
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def with_objects(frame, make):
    return frame.assign(v=column([make(n) for n in frame.n]).to_numpy())


def main():
    n_workers = int(os.environ["N_WORKERS"])
    with (
        dask.config.set({"dataframe.convert-string": False, "dataframe.shuffle.method": "p2p"}),
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, memory_limit=0, dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        # One after the other. Python 3.11 takes a lock for each cached property, so a client may
        # deadlock with a scheduler of the same process, which works on another expression.
        for name, lazy, expected in shuffles():
            future, wanted = client.compute(lazy), summary(expected)
            try:
                print(f"{name}:", "as sent" if summary(future.result()) == wanted else "changed")
            except Exception as error:
                print(f"{name}:", cause_of(error))

        values = column([Box(j) for j in range(24)]).to_numpy().reshape(6, 4)
        rechunked = da.from_array(values, chunks=(1, 4)).rechunk((6, 1), method="p2p")
        try:
            is_same = list(map(shown, rechunked.compute().flat)) == list(map(shown, values.flat))
            print("rechunk:", "as sent" if is_same else "changed")
        except Exception as error:
            print("rechunk:", cause_of(error))

        plain = pd.concat(frames(), ignore_index=True)
        plain = dd.from_pandas(plain, npartitions=N_PARTITIONS)
        for name, make in UNSENDABLE.items():
            meta = plain._meta.assign(v=column([]))
            lazy = plain.map_partitions(with_objects, make, meta=meta).shuffle(
                "k", npartitions=N_PARTITIONS
            )
            try:
                lazy.map_partitions(len, meta=("rows", "i8")).compute()
                print(f"{name}: nothing was raised")
            except Exception as error:
                print(f"{name}:", cause_of(error))
        status = dask_gpurt.status(client)
        counters = [worker["counters"] for worker in status["workers"].values()]
        print("runs on stock:", status["runs"]["stock"])
        print("spilled:", sum(one["spilled_nbytes"] for one in counters) > 0)
        paths = {link["path"] for w in status["workers"].values() for link in w["links"].values()}
        print("paths:", " ".join(sorted(map(str, paths))))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
