"""What the runtime raises on purpose; commands have errors of their own beside their code.

::

    GpurtError
    ├── ActivationError (RuntimeError)      the runtime cannot be switched on here
    │   └── StrictFallbackError             ... and `gpurt.strict` forbids going on without it
    ├── ConfigError (ValueError)            a `gpurt.*` setting that makes no sense
    ├── ProtocolError (ValueError)          bytes from a peer that are not what was agreed
    │   └── DamagedError                    ... any more: they were damaged on their way
    ├── ExchangeError (RuntimeError)        a shuffle run that cannot go on
    │   ├── IncompleteExchangeError         shards that were announced and never came
    │   └── PartitionReleasedError          an output partition asked for after it was let go
    ├── ShardStorageError (OSError)         shards on disk that cannot be read back
    ├── TierFullError (MemoryError)         a tier of memory that has no room for a value
    │   └── ValueRefusedError               ... and would not take it with room either
    ├── DamagedValueError (OSError)         a value that was put away and did not come back the same
    ├── TransportError (ConnectionError)    a link between workers that cannot be had, or broke
    │   └── LateError                       ... or that carries nothing any more
    └── SimulationError (RuntimeError)      a simulation that cannot come to its end
        └── TraceError (ValueError)         a recorded workload that cannot be replayed

One meaning each. Each also subclasses the builtin that a generic handler would expect.
"""

from __future__ import annotations

import errno

#: What an operation may run out of although nothing is wrong with what it is about.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})


class GpurtError(Exception):
    """Base of this package's errors."""


class ActivationError(GpurtError, RuntimeError):
    """The runtime cannot be active on this cluster; Dask goes on without it."""


class StrictFallbackError(ActivationError):
    """Stock Dask would do this piece of work, and `gpurt.strict` asks for an error instead."""


class ConfigError(GpurtError, ValueError):
    """A setting under `gpurt.` has a value that cannot be used."""


class ProtocolError(GpurtError, ValueError):
    """A peer sent something that is not a message of this version."""


class DamagedError(ProtocolError):
    """Bytes from a peer changed on their way; sent again they may be right."""


class ExchangeError(GpurtError, RuntimeError):
    """A shuffle run cannot go on."""


class IncompleteExchangeError(ExchangeError):
    """Shards of an input partition are missing although every worker said it was done."""


class PartitionReleasedError(ExchangeError):
    """An output partition was asked for again after its shards were let go."""


class ShardStorageError(GpurtError, OSError):
    """Shards that were written to disk cannot be read back."""


class TierFullError(GpurtError, MemoryError):
    """A tier has no room for a value; the value stays where it is."""


class ValueRefusedError(TierFullError):
    """A tier never takes this value: it is larger than the tier, or does not shrink."""


class DamagedValueError(GpurtError, OSError):
    """What a tier kept of a value is not what was put there; its task has to run again."""


class TransportError(GpurtError, ConnectionError):
    """A link to another worker cannot be had, broke, or did not deliver in time."""


class LateError(TransportError):
    """What was asked of a link did not come about in time, though the link is there."""


class SimulationError(GpurtError, RuntimeError):
    """A simulated computation failed, or nothing was left to happen before it was done."""


class TraceError(SimulationError, ValueError):
    """A recorded workload is damaged, of another version, or makes no sense."""


def will_pass(error: BaseException) -> bool:
    """Whether something failed for want of memory or descriptors, and may work later."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in _PASSING
    )
