"""Tests of the encoding of shards into messages, and of their decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dask_gpurt.codecs.codec import Section
from dask_gpurt.codecs.cpu import HOST_CODECS
from dask_gpurt.codecs.encoded_shards import Encoded, encode_shard
from dask_gpurt.errors import DamagedError, ProtocolError
from dask_gpurt.frames.adapter import Packed
from dask_gpurt.shuffle import messages
from dask_gpurt.shuffle.messages import Outgoing
from dask_gpurt.transport import wire


def outgoing(number, nbytes=5000):
    header = wire.ShardHeader(b"layout", 3, 7, number, 2, number, wire.pack_rows((1, 2)))
    buffer = np.random.default_rng(number).integers(0, 9, nbytes, dtype=np.uint8)
    return Outgoing(header, Packed(buffer, 3))


def raw(shard):
    return Encoded((shard.packed.buffer,), ())


def fresh(header):
    return np.empty(header.buffer_nbytes, dtype=np.uint8)


SHARDS = [outgoing(0), outgoing(1, nbytes=1)]


def opened(message, in_place=True):
    headers = wire.decode(message.header)
    return messages.decode_shards(headers, message.buffers, fresh, in_place=in_place)


@pytest.mark.parametrize(
    "message", [messages.local_message(SHARDS), messages.remote_message(SHARDS, raw)]
)
def test_messages_arrive_intact(message):
    for shard, sent in zip(opened(message), SHARDS, strict=True):
        assert (shard.source, shard.attempt, shard.number, shard.count) == (
            3,
            7,
            sent.header.number,
            2,
        )
        assert shard.n_rows == 3
        np.testing.assert_array_equal(shard.packed.buffer, sent.packed.buffer)


@pytest.mark.parametrize("in_place", [True, False])
def test_shards_are_copied_if_the_message_is_to_be_freed(in_place):
    message = messages.remote_message(SHARDS, raw)
    for shard, came in zip(opened(message, in_place), message.buffers, strict=True):
        np.testing.assert_array_equal(shard.packed.buffer, came)
        assert np.shares_memory(shard.packed.buffer, came) == in_place


def test_only_bytes_that_leave_the_host_are_counted():
    local, away = messages.local_message(SHARDS), messages.remote_message(SHARDS, raw)
    assert (local.raw_nbytes, local.wire_nbytes) == (0, 0)
    assert (away.raw_nbytes, away.wire_nbytes) == (5001, len(away.header) + 5001)
    assert [header.checksum for header in wire.decode(local.header)] == [0, 0]
    assert all(header.checksum for header in wire.decode(away.header))


@pytest.mark.parametrize("in_place", [True, False])
def test_damaged_message_is_noticed(in_place):
    message = messages.remote_message(SHARDS, raw)
    message.buffers[0] = message.buffers[0].copy()
    message.buffers[0][77] ^= 1
    with pytest.raises(DamagedError, match="input partition 3"):
        opened(message, in_place)


@pytest.mark.parametrize("codec", HOST_CODECS)
def test_damage_of_an_encoded_shard_is_a_damaged_error(codec):
    """A `ProtocolError` would be wrong: the peer would not send the message again."""
    values = np.arange(2000, dtype="<i8")

    def encode(shard):
        buffer = shard.packed.buffer
        return encode_shard(buffer, [Section("i", 0, buffer.nbytes, 8)], [codec])

    sent = replace(SHARDS[0], packed=Packed(values.view(np.uint8), 3))
    message = messages.remote_message([sent], encode)
    (encoded,) = message.buffers
    assert encoded.nbytes < values.nbytes
    np.testing.assert_array_equal(opened(message)[0].packed.buffer, values.view(np.uint8))
    damaged = encoded.copy()
    damaged[-1] ^= 1
    with pytest.raises(DamagedError, match="damaged on its way"):
        opened(replace(message, buffers=[damaged]))


def test_the_checksum_covers_each_byte_of_a_partly_encoded_shard():
    """A long and a short incompressible stretch, between two compressible ones."""
    noise = np.random.default_rng(0).integers(0, 256, 4500, dtype=np.uint8)
    runs = np.zeros(2000, dtype=np.uint8)
    stretches = [noise, runs, noise[:30], runs + 1]
    ends = np.cumsum([len(one) for one in stretches]).tolist()
    sections = [
        Section(str(end), end - len(one), len(one), 1)
        for one, end in zip(stretches, ends, strict=True)
    ]
    buffer = np.concatenate(stretches)
    sent = replace(SHARDS[0], packed=Packed(buffer, 3))
    message = messages.remote_message(
        [sent], lambda shard: encode_shard(shard.packed.buffer, sections, [1] * 4)
    )
    assert len(message.buffers) == 2
    np.testing.assert_array_equal(opened(message)[0].packed.buffer, buffer)
    for number, part in enumerate(message.buffers):
        for place in range(part.nbytes):
            damaged = part.copy()
            damaged[place] ^= 0x10
            buffers = [*message.buffers[:number], damaged, *message.buffers[number + 1 :]]
            with pytest.raises(DamagedError):
                opened(replace(message, buffers=buffers))


def test_no_more_memory_is_allocated_than_announced():
    """For an encoded shard, memory is allocated for the received parts and for the shard itself."""
    header = replace(SHARDS[1].header, buffer_nbytes=8, parts=(1 << 62,), table=b"\0" * 18)
    with pytest.raises(ProtocolError, match=r"out of range|do not add up"):
        messages.buffer_lengths(wire.decode(wire.encode([header])), 5000)


def test_oversized_shards_are_refused_before_allocation():
    headers = wire.decode(messages.remote_message(SHARDS, raw).header)
    assert messages.buffer_lengths(headers, 5001) == [5000, 1]
    with pytest.raises(ProtocolError, match="5001 bytes for a worker that has 5000"):
        messages.buffer_lengths(headers, 5000)


@pytest.mark.parametrize(
    ("n_peers", "times"), [(1, 4), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (100, 1)]
)
def test_messages_inside_a_host_are_larger_with_fewer_peers(n_peers, times):
    assert messages.local_message_nbytes(1000, n_peers) == 1000 * times


@pytest.mark.parametrize(
    ("n_peers", "budget_nbytes", "times"),
    [(1, 1 << 30, 32), (8, 1 << 30, 16), (1000, 1 << 30, 1), (1, 0, 1)],
)
def test_messages_from_a_device_are_larger_while_it_has_room(n_peers, budget_nbytes, times):
    message_nbytes = 1 << 20
    found = messages.device_message_nbytes(message_nbytes, n_peers, budget_nbytes)
    assert found == times * message_nbytes
