"""Exceptions that the runtime raises on purpose.

::

    GpurtError
    ├── ActivationError (RuntimeError)      the runtime cannot be switched on here
    │   └── StrictFallbackError             ... and `gpurt.strict` forbids the fallback to stock
    ├── ConfigError (ValueError)            a `gpurt.*` setting is invalid
    ├── ProtocolError (ValueError)          a peer sent bytes that violate the protocol
    │   └── DamagedError                    ... because they were damaged on the way
    ├── ExchangeError (RuntimeError)        a shuffle run cannot continue
    │   ├── IncompleteExchangeError         announced shards never arrived
    │   └── PartitionReleasedError          a task asked for a released output partition
    ├── ShardStorageError (OSError)         shards on disk cannot be read back
    ├── TierFullError (MemoryError)         a tier of memory has no room for a value
    │   └── ValueRefusedError               ... and never accepts this value
    ├── DamagedValueError (OSError)         a tier returned a value that differs from the original
    ├── TransportError (ConnectionError)    a link between workers cannot be opened, or broke
    │   └── LateError                       ... or made no progress in time
    ├── CollectiveError (RuntimeError)      an operation of a group of ranks cannot go on
    │   ├── RankLostError                   ... because the worker of a rank is gone
    │   └── GangError                       ... or the ranks cannot run at the same time
    ├── TracingError (RuntimeError)         a trace of a cluster cannot begin or go on
    │   └── TraceInProgressError            ... because another trace is on
    ├── TraceFileError (OSError)            the file of a trace cannot be read or written
    ├── SimulationError (RuntimeError)      a simulation cannot finish
    │   ├── TooLargeError                   ... because a task's inputs exceed a worker's memory
    │   └── WorkloadError (ValueError)      a recorded workload cannot be replayed
    └── PredictionError (ValueError)        a machine or a trace does not suffice for a prediction

Each class has one meaning, and also subclasses the builtin that a generic handler expects. Errors
of single commands are defined beside the command.
"""

from __future__ import annotations

import errno

#: Error codes of a temporary shortage in the process or system.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})


class GpurtError(Exception):
    """Base of this package's errors."""


class ActivationError(GpurtError, RuntimeError):
    """The runtime cannot be active on this cluster. Stock Dask continues to work."""


class StrictFallbackError(ActivationError):
    """Stock Dask would do this work, but `gpurt.strict` asks for an error instead."""


class ConfigError(GpurtError, ValueError):
    """A setting under `gpurt.` has an invalid value."""


class ProtocolError(GpurtError, ValueError):
    """A peer sent bytes that are not a message of this version."""


class DamagedError(ProtocolError):
    """Bytes from a peer changed on the way. Sending them again may help."""


class ExchangeError(GpurtError, RuntimeError):
    """A shuffle run cannot continue."""


class IncompleteExchangeError(ExchangeError):
    """Shards of an input partition are missing although every worker reported that it is done."""


class PartitionReleasedError(ExchangeError):
    """A task asked again for an output partition whose shards have been released."""


class ShardStorageError(GpurtError, OSError):
    """Shards that were spilled to disk cannot be read back."""


class TierFullError(GpurtError, MemoryError):
    """A tier has no room for a value. The value stays where it is."""


class ValueRefusedError(TierFullError):
    """A tier never accepts this value: the value is larger than the tier, or does not shrink."""


class DamagedValueError(GpurtError, OSError):
    """A tier's copy of a value differs from the original. Its task has to run again."""


class TransportError(GpurtError, ConnectionError):
    """A link to another worker cannot be opened, broke, or did not deliver in time."""


class LateError(TransportError):
    """A request on an intact link timed out."""


class CollectiveError(GpurtError, RuntimeError):
    """An operation of a group of ranks cannot go on. All ranks of the group get such an error."""


class RankLostError(CollectiveError):
    """The worker of a rank is gone.

    Attributes
    ----------
    rank
        Number of the rank.
    address
        Address of its worker.
    """

    def __init__(self, rank: int, address: str) -> None:
        super().__init__(rank, address)
        self.rank, self.address = rank, address

    def __str__(self) -> str:
        where = f"the worker at {self.address}"
        return f"rank {self.rank} is lost: {where} is gone or cannot be reached"


class GangError(CollectiveError):
    """The ranks of a group cannot run at the same time. None of them has begun its step."""


class TracingError(GpurtError, RuntimeError):
    """A trace of a cluster cannot begin, or cannot go on."""


class TraceInProgressError(TracingError):
    """A cluster is traced already. It can have one trace at a time."""


class TraceFileError(GpurtError, OSError):
    """The file of a trace is damaged or foreign, or cannot be read or written."""


class SimulationError(GpurtError, RuntimeError):
    """A simulated computation failed, or has no events left before it is done."""


class TooLargeError(SimulationError):
    """The inputs of one task are larger than the memory of a simulated worker."""


class WorkloadError(SimulationError, ValueError):
    """A recorded workload is damaged, inconsistent, or of another version."""


class PredictionError(GpurtError, ValueError):
    """A machine is unknown or badly described, or a trace has nothing to predict from."""


def is_temporary(error: BaseException) -> bool:
    """Return whether an error is a temporary lack of memory or descriptors."""
    return isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in _PASSING
    )
