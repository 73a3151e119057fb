"""Which host makes which output of a contraction, such that few operands are needed on two. Pure.

In `a @ b` each product of blocks has two operands, and each of those is an operand of a whole row
or column of products. Placed one by one, where most of what they need is, products end up where
operands happened to be made, and nearly every one of them sends something. Here outputs are dealt
out by their rows and columns, to hosts that stand in a grid themselves: a host needs the operands
of its rows and of its columns, and no more.

::

    4 x 4 outputs on 1 x 2 hosts: every block       on 2 x 2 hosts: every block
    of `a` is sent once, none of `b`                is sent once
            b0  b1  b2  b3                                  b0  b1  b2  b3
        a0   1   2   1   2                              a0   1   2   1   2
        a1   1   2   1   2                              a1   3   4   3   4
        a2   1   2   1   2                              a2   1   2   1   2
        a3   1   2   1   2                              a3   3   4   3   4

Rows and columns are dealt in turns, so that all hosts have something to do from the start: the
block-cyclic distribution of ScaLAPACK (Choi et al., "ScaLAPACK: A Portable Linear Algebra Library
for Distributed Memory Computers", 1996).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

#: What a host may be given, to the mean of all. With 7 rows and 7 columns on 4 times 4 hosts one
#: makes 4 outputs where 3 would be its share: the bytes that saves are not worth a third more time.
MAX_OVERLOAD = 1.25


class Operand(NamedTuple):
    """A result that several products need.

    Attributes
    ----------
    hosts
        Those that have it.
    """

    key: Hashable
    nbytes: float
    hosts: Iterable[str] = ()


class Side(NamedTuple):
    """Rows, or columns, of outputs.

    Attributes
    ----------
    length
        How many there are; it may be a fraction, where it is reckoned from the sizes of groups.
    nbytes
        Of all their operands.
    """

    length: float
    nbytes: float


def grid(n_hosts: int, rows: Side, columns: Side) -> tuple[int, int] | None:
    """Rows and columns of hosts such that least is sent; None if some would have far too much."""
    shapes = [(n, n_hosts // n) for n in range(1, n_hosts + 1) if n_hosts % n == 0]
    return min(
        (one for one in shapes if _overload(one, rows.length, columns.length) <= MAX_OVERLOAD),
        key=lambda one: (one[1] - 1) * rows.nbytes + (one[0] - 1) * columns.nbytes,
        default=None,
    )


def _overload(shape: tuple[int, int], n_rows: float, n_columns: float) -> float:
    """Outputs of the host that has most of them, to the mean."""
    most = ceil(n_rows / shape[0]) * ceil(n_columns / shape[1])
    return most * shape[0] * shape[1] / (n_rows * n_columns)


class Plan:
    """Rows and columns of one contraction, and the rows and columns of hosts that they went to.

    Parameters
    ----------
    hosts
        All of them, with as many threads each.
    shape
        Rows and columns of hosts, from `grid`.
    """

    def __init__(self, hosts: Sequence[str], shape: tuple[int, int]) -> None:
        n_rows, n_columns = shape
        self._rows = _Axis([hosts[n * n_columns : (n + 1) * n_columns] for n in range(n_rows)])
        self._columns = _Axis([hosts[n::n_columns] for n in range(n_columns)])

    def assign(self, row: Sequence[Operand], column: Sequence[Operand]) -> str:
        """Where an output is made.

        Parameters
        ----------
        row, column
            First and second operands of its products. Two outputs are in a row if they share a
            first operand, and in a column if they share a second one.
        """
        return _common(self._rows.assign(row), self._columns.assign(column))

    def host_of_product(self, one: Hashable, other: Hashable) -> str | None:
        """Where the product of a first and a second operand is made; None if not dealt yet."""
        row, column = self._rows.hosts_of(one), self._columns.hosts_of(other)
        return _common(row, column) if row and column else None

    def host_of_operand(self, operand: Hashable) -> str | None:
        """Where an operand is best made; None if none of its products was dealt yet."""
        return self._rows.maker_of.get(operand) or self._columns.maker_of.get(operand)


def _common(row: Sequence[str], column: Sequence[str]) -> str:
    (host,) = (one for one in row if one in column)
    return host


class _Axis:
    """Rows, or columns, of hosts, and which of those operands belong to."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        self._parts = parts
        self._n_assigned = [0] * len(parts)
        self._number_of: dict[Hashable, int] = {}
        #: Hosts that make operands.
        self.maker_of: dict[Hashable, str] = {}

    def hosts_of(self, operand: Hashable) -> Sequence[str]:
        """Hosts that need an operand; none if it was not dealt yet."""
        number = self._number_of.get(operand)
        return () if number is None else self._parts[number]

    def assign(self, operands: Sequence[Operand]) -> Sequence[str]:
        """Hosts that need some operands, which are dealt if none of them was."""
        numbers = self._number_of
        number = next((numbers[one.key] for one in operands if one.key in numbers), None)
        if number is None:
            number = self._choose_part(operands)
            self._n_assigned[number] += 1
        part = self._parts[number]
        # In turns, so that all of them send as much as they receive; and each time from another
        # one on, so that not all first blocks of rows are made by one.
        for turn, one in enumerate(operands, self._n_assigned[number]):
            if one.key not in numbers:
                numbers[one.key] = number
                self.maker_of[one.key] = part[turn % len(part)]
        return part

    def _choose_part(self, operands: Iterable[Operand]) -> int:
        """One that is not ahead of others, and of those the one that has most of the operands."""
        held_nbytes: dict[str, float] = {}
        for _, nbytes, hosts in operands:
            for host in hosts:
                held_nbytes[host] = held_nbytes.get(host, 0.0) + nbytes
        least = min(self._n_assigned)
        behind = [number for number, n in enumerate(self._n_assigned) if n == least]
        return max(
            behind,
            key=lambda number: sum(held_nbytes.get(host, 0.0) for host in self._parts[number]),
        )
