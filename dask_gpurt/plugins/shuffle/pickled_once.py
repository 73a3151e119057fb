"""Objects that the scheduler sends to every worker of a run, and pickles once.

A description of 10,000 partitions and their owners takes a scheduler a millisecond to pickle, and
each of 1,000 workers asks for it. It never changes during a run, so the first pickle serves all.
The pickle is also compressed once. It compresses well, because it repeats the same addresses.
"""

from __future__ import annotations

import zlib
from typing import Any

from distributed.protocol.pickle import dumps, loads

#: Attribute with the pickle.
_PICKLE = "_pickle_of_run"


def _packed(value: Any) -> bytes:
    return zlib.compress(dumps(value), level=1)


def unpacked(packed: bytes) -> Any:
    """Return the value of a compressed pickle. Workers call this."""
    return loads(zlib.decompress(packed))


def restored_spec(kind: type[Any], packed: bytes) -> Any:
    """Return a spec of this kind. Workers call this."""
    made = object.__new__(kind)
    vars(made).update(unpacked(packed))
    return made


class SpecPickledOnce:
    """A base of specs, which do not change once they are made."""

    def __reduce__(self) -> tuple[Any, ...]:
        packed = vars(self).get(_PICKLE)
        if packed is None:
            packed = _packed(vars(self))
            # Not by assignment: specs are frozen.
            vars(self)[_PICKLE] = packed
        return restored_spec, (type(self), packed)

    def create_new_run(self, worker_for: dict[Any, str], span_id: str | None) -> Any:
        """Return the scheduler's state of a new run. distributed calls this."""
        parent: Any = super()
        return parent.create_new_run(OwnersPickledOnce(worker_for), span_id)


class OwnersPickledOnce(dict[Any, str]):
    """Owners of output partitions. Workers get a plain dict. Must not be changed."""

    _pickle: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._pickle is None:
            self._pickle = _packed(dict(self))
        return unpacked, (self._pickle,)
