"""Assignment of the outputs of a contraction to hosts, so that few operands go to two hosts. Pure.

In `a @ b` each product of blocks has two operands, and each operand is needed by a whole row or
column of products. If each product goes to the worker with most of its inputs, products end up
where operands happened to be made. Then nearly every product sends something. This module assigns
outputs by rows and columns to hosts that form a grid. A host needs only the operands of its rows
and columns.

::

    4 x 4 outputs on 1 x 2 hosts: every block       on 2 x 2 hosts: every block
    of `a` is sent once, none of `b`                is sent once
            b0  b1  b2  b3                                  b0  b1  b2  b3
        a0   1   2   1   2                              a0   1   2   1   2
        a1   1   2   1   2                              a1   3   4   3   4
        a2   1   2   1   2                              a2   1   2   1   2
        a3   1   2   1   2                              a3   3   4   3   4

Rows and columns are assigned in turns, so that all hosts have work from the start. This is the
block-cyclic distribution of ScaLAPACK (Choi et al., "ScaLAPACK: A Portable Linear Algebra Library
for Distributed Memory Computers", 1996).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import ceil
from typing import NamedTuple

#: The most outputs that a host may be given, relative to the mean. With 7 rows and 7 columns on 4
#: times 4 hosts, one host makes 4 outputs, and its share is 3. The bytes that such a grid saves are
#: not worth a third more time.
MAX_OVERLOAD = 1.25


class Operand(NamedTuple):
    """A result that several products need.

    Attributes
    ----------
    hosts
        Hosts that have the result.
    """

    key: Hashable
    nbytes: float
    hosts: Iterable[str] = ()


class Side(NamedTuple):
    """The rows, or the columns, of outputs.

    Attributes
    ----------
    length
        Number of rows; a fraction if it is estimated from the sizes of groups.
    nbytes
        Bytes of all their operands.
    """

    length: float
    nbytes: float


def grid(n_hosts: int, rows: Side, columns: Side) -> tuple[int, int] | None:
    """Return the rows and columns of hosts that send least; None if every grid overloads a host."""
    shapes = [(n, n_hosts // n) for n in range(1, n_hosts + 1) if n_hosts % n == 0]
    return min(
        (one for one in shapes if _overload(one, rows.length, columns.length) <= MAX_OVERLOAD),
        key=lambda one: (one[1] - 1) * rows.nbytes + (one[0] - 1) * columns.nbytes,
        default=None,
    )


def _overload(shape: tuple[int, int], n_rows: float, n_columns: float) -> float:
    """Return the number of outputs of the host with the most, relative to the mean."""
    most = ceil(n_rows / shape[0]) * ceil(n_columns / shape[1])
    return most * shape[0] * shape[1] / (n_rows * n_columns)


class ContractionPlan:
    """The assignment of one contraction's rows and columns to rows and columns of hosts.

    Parameters
    ----------
    hosts
        All hosts, with equally many threads each.
    shape
        Rows and columns of hosts, from `grid`.
    """

    def __init__(self, hosts: Sequence[str], shape: tuple[int, int]) -> None:
        n_rows, n_columns = shape
        self._rows = _Axis([hosts[n * n_columns : (n + 1) * n_columns] for n in range(n_rows)])
        self._columns = _Axis([hosts[n::n_columns] for n in range(n_columns)])

    def assign(self, row: Sequence[Operand], column: Sequence[Operand]) -> str:
        """Return the host that makes an output; assign its row and column if they are new.

        Parameters
        ----------
        row, column
            First and second operands of the output's products. Two outputs are in the same row if
            they share a first operand, and in the same column if they share a second one.
        """
        return _common(self._rows.assign(row), self._columns.assign(column))

    def host_of_product(self, one: Hashable, other: Hashable) -> str | None:
        """Return the host for the product of two operands; None if one is not assigned yet."""
        row, column = self._rows.hosts_of(one), self._columns.hosts_of(other)
        return _common(row, column) if row and column else None

    def host_of_operand(self, operand: Hashable) -> str | None:
        """Return the best host to make an operand; None if none of its products is assigned yet."""
        return self._rows.maker_of.get(operand) or self._columns.maker_of.get(operand)


def _common(row: Sequence[str], column: Sequence[str]) -> str:
    (host,) = (one for one in row if one in column)
    return host


class _Axis:
    """The rows, or the columns, of hosts, and the operands assigned to each."""

    def __init__(self, parts: Sequence[Sequence[str]]) -> None:
        self._parts = parts
        self._n_assigned = [0] * len(parts)
        self._number_of: dict[Hashable, int] = {}
        #: Host that makes each operand.
        self.maker_of: dict[Hashable, str] = {}

    def hosts_of(self, operand: Hashable) -> Sequence[str]:
        """Return the hosts that need an operand; empty if it is not assigned yet."""
        number = self._number_of.get(operand)
        return () if number is None else self._parts[number]

    def assign(self, operands: Sequence[Operand]) -> Sequence[str]:
        """Return the hosts that need some operands; assign the operands if none is assigned."""
        numbers = self._number_of
        number = next((numbers[one.key] for one in operands if one.key in numbers), None)
        if number is None:
            number = self._choose_part(operands)
            self._n_assigned[number] += 1
        part = self._parts[number]
        # Hosts make operands in turns, so that each sends as much as it receives. Each row starts
        # with another host, so that one host does not make the first blocks of all rows.
        for turn, one in enumerate(operands, self._n_assigned[number]):
            if one.key not in numbers:
                numbers[one.key] = number
                self.maker_of[one.key] = part[turn % len(part)]
        return part

    def _choose_part(self, operands: Iterable[Operand]) -> int:
        """Return the part with most of the operands, of the parts with the fewest rows so far."""
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
