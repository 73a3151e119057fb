"""Values that were read for messages: at hand while they are sent, and not at home.

Several messages may want one value; it is read once. What is lent takes memory all the same, and
is counted as promised at the level that it did not come to. Whoever calls holds the store's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dask_gpurt.memory.decisions.residency import Level


@dataclass(eq=False)
class _Loan:
    value: Any
    nbytes: int
    level: Level
    users: int = 1


class Loans:
    """Lent values by the serial numbers that the residency gave them."""

    def __init__(self) -> None:
        self._loans: dict[int, _Loan] = {}

    def __contains__(self, serial: int) -> bool:
        return serial in self._loans

    def __getitem__(self, serial: int) -> Any:
        return self._loans[serial].value

    def add(self, serial: int, value: Any, nbytes: int, level: Level) -> None:
        """A value was read for one message; its memory counts at that level."""
        self._loans[serial] = _Loan(value, nbytes, level)
        level.reserved_nbytes += nbytes

    def again(self, serial: int) -> bool:
        """Another message wants a value; False if it is not lent."""
        loan = self._loans.get(serial)
        if loan is None:
            return False
        loan.users += 1
        return True

    def take_back(self, serial: int) -> None:
        """A message is through."""
        loan = self._loans[serial]
        loan.users -= 1
        if not loan.users:
            del self._loans[serial]
            loan.level.reserved_nbytes -= loan.nbytes
