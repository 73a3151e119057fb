"""The plain values that ranks and the scheduler send each other: headers of slices, and failures.

Any process that reaches a worker can send them, so all numbers and lengths are checked. Pure.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dask_gpurt.collectives.reduction import disagreement
from dask_gpurt.errors import CollectiveError, GangError, ProtocolError, RankLostError
from dask_gpurt.plugins import request_checks

#: Message to the scheduler: the step of a rank has ended, and no answer came.
LEFT = "gpurt-gang-left"
#: Slowest link that is believed, in bytes a second.
LEAST_RATE = 1e6
#: Largest rank or number of slices. More ranks than a cluster has workers.
_MOST = 1 << 20
#: Most bytes of the description of a value.
_MOST_NBYTES = 4096
#: Most dimensions of an array. NumPy allows as many.
_MOST_DIMENSIONS = 64
#: Kinds of types whose values are plain bytes.
MOVABLE = frozenset("biufcmMSU")
#: Kinds of types that can be added up.
ADDABLE = frozenset("biufc")
#: Operation, step, rank of the sender, first slice, number of slices, bytes, checksum or 0.
_HEADER = struct.Struct("<QIIIIQQ")


@dataclass(frozen=True, slots=True)
class OperationCall:
    """The operation that a rank calls, with the shape and type of its value.

    Attributes
    ----------
    call
        The operation as the user calls it, such as `allreduce(sum)`.
    dtype
        As NumPy writes it.
    algorithm, n_slices
        Chosen from the other attributes, so all ranks choose the same.
    """

    call: str
    shape: tuple[int, ...]
    dtype: str
    algorithm: str
    n_slices: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def encoded(self) -> bytes:
        return json.dumps(
            [self.call, self.shape, self.dtype, self.algorithm, self.n_slices]
        ).encode()

    @classmethod
    def decoded(cls, text: bytes) -> OperationCall:
        """Return the subject in a header.

        Raises
        ------
        ProtocolError
            It is malformed.
        """
        try:
            call, shape, dtype, algorithm, n_slices = json.loads(text)
            kind = np.dtype(dtype)
            if kind.kind not in MOVABLE or not kind.itemsize or len(dtype) > 32:
                raise ProtocolError(f"a value of type {dtype[:32]} cannot be sent")
            numbers = [*shape, n_slices]
            if len(shape) > _MOST_DIMENSIONS or not all(type(one) is int for one in numbers):
                raise ProtocolError("a value with a malformed shape")
            if min(numbers) < 0 or not 0 < n_slices < _MOST:
                raise ProtocolError("a value with a negative length")
            for one in (call, algorithm):
                request_checks.name("operation", one)
        except ProtocolError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError("not the description of a value") from error
        return cls(call, tuple(shape), dtype, algorithm, n_slices)

    def differs(self, rank: int, other: OperationCall, peer: int) -> str:
        """Return how the value or call of a rank differs from that of another one."""
        if self.call != other.call:
            first, second = sorted([(rank, self.call), (peer, other.call)])
            return f"rank {second[0]} calls {second[1]}, rank {first[0]} calls {first[1]}"
        return disagreement(
            {one: (of.shape, str(np.dtype(of.dtype))) for one, of in ((rank, self), (peer, other))}
        ) or (
            f"ranks {rank} and {peer} chose {self.algorithm} and {other.algorithm}: "
            "they have different versions of dask_gpurt"
        )


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """The header of a message with slices.

    Attributes
    ----------
    epoch
        Number of the operation in its group.
    step
        Number of the step in the operation.
    rank
        The sender.
    subject
        The sender's operation and value, encoded.
    """

    epoch: int
    step: int
    rank: int
    first: int
    count: int
    nbytes: int
    checksum: int
    subject: bytes

    def encoded(self) -> bytes:
        return (
            _HEADER.pack(
                self.epoch,
                self.step,
                self.rank,
                self.first,
                self.count,
                self.nbytes,
                self.checksum,
            )
            + self.subject
        )

    @classmethod
    def decoded(cls, header: Any) -> SliceHeader:
        """Return a received header.

        Raises
        ------
        ProtocolError
            It is malformed.
        """
        if (
            not isinstance(header, (bytes, bytearray))
            or not _HEADER.size <= len(header) <= _HEADER.size + _MOST_NBYTES
        ):
            raise ProtocolError("not a message of a collective operation")
        fields: tuple[int, int, int, int, int, int, int] = _HEADER.unpack_from(header)
        return cls(*fields, bytes(header[_HEADER.size :]))


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """Why a group has ended, in plain values. All of its ranks get the same one.

    Attributes
    ----------
    kind
        `lost`: the worker of a rank is gone. `gang`: the ranks cannot run at the same time.
        `failed`: anything else.
    rank, address
        The rank that is lost.
    """

    kind: str
    text: str = ""
    rank: int = 0
    address: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def checked(cls, plain: Any) -> GroupFailure:
        """Return a received failure.

        Raises
        ------
        ProtocolError
            It is malformed.
        """
        if not isinstance(plain, Mapping) or plain.keys() != {"kind", "text", "rank", "address"}:
            raise ProtocolError("not the failure of a group")
        if plain["kind"] not in ("lost", "gang", "failed"):
            raise ProtocolError("a failure of an unknown kind")
        request_checks.problem(plain["text"])
        request_checks.name("address", plain["address"])
        if type(plain["rank"]) is not int or not 0 <= plain["rank"] < _MOST:
            raise ProtocolError("a failure of a malformed rank")
        return cls(**plain)

    @classmethod
    def of(cls, error: BaseException) -> GroupFailure:
        if isinstance(error, RankLostError):
            return cls("lost", rank=error.rank, address=error.address)
        return cls("failed", str(error)[: request_checks.MAX_PROBLEM])

    def error(self) -> CollectiveError:
        """Return a new error: each rank raises its own, with its own traceback."""
        if self.kind == "lost":
            return RankLostError(self.rank, self.address)
        return GangError(self.text) if self.kind == "gang" else CollectiveError(self.text)
