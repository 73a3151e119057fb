"""Python objects on their way out of a process, and back.

Objects have no layout of their own, so they are pickled. The functions come from outside: Dask's
own carry classes of the user's script by value, which plain pickle refuses. An error names the
column. This module does no I/O.
"""

from __future__ import annotations

import datetime
import decimal
import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

#: `dumps(value, protocol=5, buffer_callback=f)`, and its inverse `loads(data, buffers=...)`.
Dumps = Callable[..., bytes]
Loads = Callable[..., Any]

#: Types of which every object can be pickled.
_HARMLESS = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, bytearray,
        datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone,
        decimal.Decimal, uuid.UUID, pd.Timestamp, pd.Timedelta, pd.Period,
        type(pd.NA), type(pd.NaT),
        np.str_, np.bytes_, np.bool_, np.datetime64, np.timedelta64,
        *(np.dtype(code).type for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]),
    }
)  # fmt: skip
#: Objects of a column that are tried before it is cut.
_MOST_TRIED = 100


@dataclass(frozen=True)
class Pickling:
    """How objects are pickled.

    Parameters
    ----------
    dumps, loads
        As those of `pickle`.
    """

    dumps: Dumps = pickle.dumps
    loads: Loads = pickle.loads

    def dump(self, value: Any, what: str) -> bytes:
        """Pickle a value.

        Parameters
        ----------
        what
            Names the value in an error.

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
        """Pickle the objects of several columns at once.

        Parameters
        ----------
        name
            Name of a column by its position in `columns`.

        Raises
        ------
        TypeError
            The objects of a column, which is named, cannot be pickled.
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
        """Inverse of `dump_columns`. What is raised gets a note with the name."""
        try:
            return self.loads(data)
        except Exception as error:
            error.add_note(f"This came up as a worker read objects that it was sent: {name()}.")
            raise

    def try_some(self, values: Any, what: str) -> None:
        """Refuse objects that cannot be pickled, whether or not they are going to be.

        Without this, the number of workers would decide whether a program fails. One object of each
        type is tried, and a sample: to pickle all would take as long as to send them.

        Parameters
        ----------
        values
            An array of objects. Arrays of other kinds are not looked into.

        Raises
        ------
        TypeError
            An object cannot be pickled.
        """
        if not isinstance(values, np.ndarray) or not values.dtype.hasobject:
            return
        flat = np.asarray(values).flat
        suspects = set(map(type, flat)) - _HARMLESS
        if suspects:
            some = [v for v in flat[:: -(-len(flat) // _MOST_TRIED)] if type(v) in suspects]
            unseen = suspects - set(map(type, some))
            some += [next(v for v in flat if type(v) is kind) for kind in unseen]
            self.dump(some, what)
