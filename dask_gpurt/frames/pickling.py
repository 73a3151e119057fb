"""Pickling of Python objects that leave a process.

Objects have no layout of their own, so they are pickled. The caller passes the functions: Dask's
functions carry classes of the user's script by value, which plain pickle refuses. Errors name the
column. This module does no I/O.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import pickle
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: `dumps(value, protocol=5, buffer_callback=f)`, and its inverse `loads(data, buffers=...)`.
Dumps = Callable[..., bytes]
Loads = Callable[..., Any]

#: Types whose objects can always be pickled.
_HARMLESS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, bytearray,
        datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone,
        decimal.Decimal, uuid.UUID,
        np.str_, np.bytes_, np.bool_, np.datetime64, np.timedelta64,
        *(np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]),
    }
)  # fmt: skip


@functools.cache
def _harmless_of_pandas() -> frozenset[type]:
    # Not at import: every worker imports this module, and a program may need no pandas.
    import pandas as pd

    return frozenset({pd.Timestamp, pd.Timedelta, pd.Period, type(pd.NA), type(pd.NaT)})


#: Objects of a column that are tried before its rows are gathered.
_MOST_TRIED = 100


@dataclass(frozen=True)
class Pickling:
    """A pair of functions that pickle and unpickle.

    Parameters
    ----------
    dumps, loads
        As in the module `pickle`.
    """

    dumps: Dumps = pickle.dumps
    loads: Loads = pickle.loads

    def dump(self, value: Any, what: str) -> bytes:
        """Pickle a value.

        Parameters
        ----------
        what
            Name of the value in an error.

        Raises
        ------
        TypeError
            The value cannot be pickled.
        """
        try:
            return self.dumps(value, protocol=5)
        except MemoryError:
            raise
        except Exception as error:
            raise TypeError(
                f"{what} cannot be sent to another worker or to disk: not everything in it can be"
                f" pickled ({error}). Leave it out before the shuffle, or keep there what the"
                " objects are made of."
            ) from error

    def dump_columns(self, columns: Sequence[Any], name: Callable[[int], str]) -> bytes:
        """Pickle the objects of several columns together.

        Parameters
        ----------
        name
            Returns the name of a column, given its position in `columns`.

        Raises
        ------
        TypeError
            The objects of a column cannot be pickled. The error names the column.
        """
        try:
            return self.dumps(list(columns), protocol=5)
        except MemoryError:
            raise
        except Exception:
            for position, values in enumerate(columns):
                self.dump(values, name(position))
            raise

    def load_columns(self, data: Any, name: Callable[[], str]) -> Any:
        """Unpickle the result of `dump_columns`. Errors get a note with the name."""
        try:
            return self.loads(data)
        except Exception as error:
            error.add_note(f"This came up as a worker read objects that it was sent: {name()}.")
            raise

    def try_some(self, values: Any, what: str) -> None:
        """Refuse objects that cannot be pickled, even if they stay in this process.

        Otherwise, the number of workers would decide whether a program fails. This tries a sample
        and one object of each type: pickling all would take as long as sending them.

        Parameters
        ----------
        values
            An array of objects. Arrays of other kinds are not checked.

        Raises
        ------
        TypeError
            An object cannot be pickled.
        """
        if not isinstance(values, np.ndarray) or not values.dtype.hasobject:
            return
        flat = np.asarray(values).flat
        suspects = set(map(type, flat)) - _HARMLESS
        if suspects and "pandas" in sys.modules:
            suspects -= _harmless_of_pandas()
        if suspects:
            some = [v for v in flat[:: -(-len(flat) // _MOST_TRIED)] if type(v) in suspects]
            unseen = suspects - set(map(type, some))
            some += [next(v for v in flat if type(v) is kind) for kind in unseen]
            self.dump(some, what)
