"""The layout of a whole frame: the layout of each column, and the place of each part in a buffer.

Columns of one NumPy type share a two-dimensional region, so that a thousand columns cost little
more than one. This module only describes. `frames.pandas_` gathers and joins the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from dask_gpurt.frames.adapter import Section
from dask_gpurt.frames.columns import Layout
from dask_gpurt.frames.flat.flattening import is_scalar
from dask_gpurt.frames.pickling import Pickling

_ALIGNMENT = 8


@dataclass(frozen=True)
class Group:
    """Parts of one NumPy type. They travel as the rows of one two-dimensional array.

    `members` are pairs of column and part. Index levels are numbered after the columns. The first
    `n_plain` members are whole columns and become one block of the result.
    """

    dtype: np.dtype[Any]
    members: tuple[tuple[int, int], ...]
    n_plain: int


@dataclass(frozen=True)
class FrameLayout:
    """The layout of every column and index level of a frame.

    Attributes
    ----------
    pickling
        Used for names that are objects.
    """

    columns: tuple[Layout, ...]
    index: tuple[Layout, ...]
    index_names: tuple[Any, ...]
    pickling: Pickling = field(default_factory=Pickling, compare=False)

    @cached_property
    def key(self) -> bytes:
        names: list[Any] = []
        for level, name in enumerate(self.index_names):
            plain = is_scalar(name)
            what = f"the name of index level {level}, {name!r},"
            names.append([plain, name if plain else self.pickling.dump(name, what)])
        return msgpack.packb(  # type: ignore[no-any-return]
            [[c.to_plain() for c in self.columns], [i.to_plain() for i in self.index], names]
        )

    @staticmethod
    def from_key(key: bytes, pickling: Pickling | None = None) -> FrameLayout:
        pickling = pickling or Pickling()
        try:
            columns, index, names = msgpack.unpackb(key)
            layout = FrameLayout(
                tuple(Layout.from_plain(column) for column in columns),
                tuple(Layout.from_plain(level) for level in index),
                tuple(name if plain else pickling.loads(name) for plain, name in names),
                pickling,
            )
        except (TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
            raise ValueError(f"not the layout of a pandas frame: {error}") from error
        if not index or len(index) != len(names):
            raise ValueError(f"the index has {len(index)} levels, but {len(names)} names")
        return layout

    @cached_property
    def all(self) -> tuple[Layout, ...]:
        return self.columns + self.index

    @cached_property
    def shape(self) -> tuple[Any, ...]:
        """Everything except the categories. Frames of one shape are concatenated directly."""

        def without_categories(layout: Layout) -> Any:
            detail = layout.detail[:1] if layout.kind == "categorical" else layout.detail
            children = tuple(without_categories(child) for child in layout.children)
            return (layout.kind, layout.parts, detail, children)

        return (tuple(without_categories(layout) for layout in self.all), self.index_names)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        plain: dict[str, list[tuple[int, int]]] = {}
        other: dict[str, list[tuple[int, int]]] = {}
        n_columns = len(self.columns)
        for number, layout in enumerate(self.all):
            is_column = layout.kind == "plain" and number < n_columns
            for part, dtype in enumerate(layout.parts):
                (plain if is_column else other).setdefault(dtype, []).append((number, part))
        dtypes = sorted(plain.keys() | other.keys(), key=lambda d: (-np.dtype(d).itemsize, d))
        return tuple(
            Group(
                np.dtype(dtype),
                tuple(plain.get(dtype, []) + other.get(dtype, [])),
                len(plain.get(dtype, [])),
            )
            for dtype in dtypes
        )

    @cached_property
    def arrow(self) -> tuple[int, ...]:
        return tuple(n for n, layout in enumerate(self.all) if layout.arrow)

    @cached_property
    def objects(self) -> tuple[int, ...]:
        return tuple(n for n, layout in enumerate(self.all) if layout.objects)

    def fixed_nbytes(self, n_rows: int) -> int:
        return sum(
            _aligned(len(group.members) * n_rows * group.dtype.itemsize) for group in self.groups
        )

    def regions(self, buffer: npt.NDArray[np.uint8], n_rows: int) -> list[npt.NDArray[Any]]:
        """Return a two-dimensional view of each group. The groups follow each other in `buffer`."""
        views = []
        first = 0
        for group in self.groups:
            nbytes = len(group.members) * n_rows * group.dtype.itemsize
            view = buffer[first : first + nbytes].view(group.dtype)
            views.append(view.reshape(len(group.members), n_rows))
            first += _aligned(nbytes)
        return views

    def sections(
        self,
        n_rows: int,
        arrow_nbytes: int,
        pickle_nbytes: int,
        names: Sequence[str] = (),
    ) -> list[Section]:
        """Return name, offset, bytes and item size of all sections of a packed shard, in order.

        Each part of a column is a section. Padding is a section of its own: it was never written,
        and must not count as an item.

        Parameters
        ----------
        n_rows, arrow_nbytes, pickle_nbytes
            As in `Packed`.
        names
            Names of the columns, then of the index levels. Numbers replace missing names.
        """
        found: list[Section] = []
        position = 0
        for number, group in enumerate(self.groups):
            nbytes = n_rows * group.dtype.itemsize
            end = position + _aligned(nbytes * len(group.members))
            for column, part in group.members:
                name = self.name(column, names)
                if part:
                    name += f" part {part}"
                found.append((name, position, nbytes, group.dtype.itemsize))
                position += nbytes
            found.append((f"padding {number}", position, end - position, 1))
            position = end
        for name, nbytes in (("arrow", arrow_nbytes), ("pickle", pickle_nbytes)):
            found.append((name, position, nbytes, 1))
            position += nbytes
        return [section for section in found if section[2]]

    def name(self, number: int, names: Sequence[str] = ()) -> str:
        """Return the name of a column or index level, numbered as in `all`."""
        if number < len(names):
            return names[number]
        if number < len(self.columns):
            return f"column {number}"
        return f"index level {number - len(self.columns)}"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
