"""Bytes that each peer may have under way to a receiver, so that many senders do not fill it.

A receiver takes memory for a message before the budget for shards counts it. So its messages under
way have a budget of their own, which its senders share. Each answer carries the sender's part of
it, the *credit*. Everything here is arithmetic; the caller passes the time.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from typing import Any

from dask_gpurt.errors import ProtocolError
from dask_gpurt.shuffle.plan import SHARD_TARGET_NBYTES

#: Messages in flight to one peer. Two hide the wait for the acknowledgement.
N_MESSAGES = 2
#: With more peers than this, one message to each is enough: others hide the wait. A second one
#: would cost both sides an open file.
FEW_PEERS = 32
#: Part of a worker's memory limit for messages that arrive.
_SHARE = 1 / 8
#: Up to this many senders need no credit: together they send about 128 MiB.
_N_FREE = 8
#: A sender counts for this long after its last message.
LATELY_S = 5.0
_MOST_NBYTES = 1 << 62


def part_nbytes(memory_nbytes: int, n_senders: int) -> int:
    """Return the bytes that each sender may have under way to a receiver.

    Parameters
    ----------
    memory_nbytes
        Memory limit of the receiver.
    """
    if n_senders <= _N_FREE:
        return memory_nbytes
    return max(1, int(_SHARE * memory_nbytes) // n_senders)


def pace(message_nbytes: int, credit_nbytes: int) -> tuple[int, int]:
    """Return the size at which a message is closed, and the messages that may be in flight.

    The shard that closes a message may exceed the size. So the size is smaller than the credit by a
    shard. A message has at least one shard.

    Parameters
    ----------
    message_nbytes
        Size without a credit.
    """
    each_nbytes = credit_nbytes // N_MESSAGES
    if each_nbytes > SHARD_TARGET_NBYTES:
        return min(message_nbytes, each_nbytes - SHARD_TARGET_NBYTES), N_MESSAGES
    return min(message_nbytes, max(1, credit_nbytes - SHARD_TARGET_NBYTES)), 1


def most_messages(n_peers: int) -> int:
    """Return how many messages may be in flight to each of `n_peers` peers."""
    return N_MESSAGES if n_peers <= FEW_PEERS else 1


def in_turn(workers: Sequence[str], own: str) -> tuple[str, ...]:
    """Return the other workers in the order in which a worker sends to them.

    Each worker begins with the one after itself. Otherwise all would begin with the same receiver.
    """
    if own in workers:
        first = workers.index(own) + 1
    else:
        first = zlib.crc32(own.encode()) % max(len(workers), 1)
    return tuple(one for one in (*workers[first:], *workers[:first]) if one != own)


def checked(credit_nbytes: Any) -> int:
    """Return the credit of an answer.

    Raises
    ------
    ProtocolError
        The answer has no valid credit.
    """
    if type(credit_nbytes) is not int or not 0 < credit_nbytes <= _MOST_NBYTES:
        raise ProtocolError(f"an answer has an invalid credit: {str(credit_nbytes)[:100]!r}")
    return credit_nbytes


class RecentSenders:
    """The workers that lately sent to one receiver, over all of its runs.

    Parameters
    ----------
    memory_nbytes
        Memory limit of the receiver.
    """

    def __init__(self, memory_nbytes: int) -> None:
        self._memory_nbytes = memory_nbytes
        #: Time of the last message of each sender; the oldest is first.
        self._seen_s: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._seen_s)

    def note(self, sender: Hashable, now_s: float) -> None:
        """Note that a message of this sender begins to arrive."""
        seen = self._seen_s
        seen.pop(sender, None)
        seen[sender] = now_s
        while seen[oldest := next(iter(seen))] < now_s - LATELY_S:
            del seen[oldest]

    def credit_nbytes(self, n_peers: int) -> int:
        """Return the credit of each sender.

        Parameters
        ----------
        n_peers
            Number of peers in a run. With several runs, more workers may have sent lately. While
            some have not begun, fewer have.
        """
        return part_nbytes(self._memory_nbytes, max(n_peers, len(self._seen_s)))
