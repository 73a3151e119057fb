"""Tests of a link's bandwidth, as the kernel reports it."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from dask_gpurt.transport.rate import TCP_INFO_NBYTES, LinkRate, delivery_rate


def tcp_info(rate, *, app_limited=False, nbytes=TCP_INFO_NBYTES):
    info = bytearray(200)
    info[7] = app_limited
    info[160:168] = struct.pack("=Q", rate)
    return bytes(info[:nbytes])


def test_the_rate_is_read():
    assert delivery_rate(tcp_info(123_456_789)) == 123_456_789


@pytest.mark.parametrize(
    "info",
    [
        tcp_info(5, app_limited=True),
        tcp_info(0),
        tcp_info(5, nbytes=TCP_INFO_NBYTES - 1),
        b"",
    ],
)
def test_readings_without_a_rate_are_none(info):
    assert delivery_rate(info) is None


@pytest.mark.skipif(sys.platform != "linux", reason="the layout is Linux's")
def test_a_real_connection_has_a_rate():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as ours:
            theirs, _ = server.accept()
            with theirs:
                readings = []
                for _ in range(200):
                    ours.sendall(bytes(1 << 16))
                    left = 1 << 16
                    while left:
                        left -= len(theirs.recv(left))
                    info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
                    # The kernel decides by timing whether this test limited the rate.
                    info = bytes(info[:7]) + b"\0" + bytes(info[8:])
                    readings.append(delivery_rate(info))
    assert any(rate and 10**6 < rate < 10**12 for rate in readings)


def known(*readings):
    rate = LinkRate()
    for reading in readings:
        rate.add(reading)
    return rate.bandwidth


def test_too_few_readings_give_no_bandwidth():
    assert known() is None
    assert known(7, 7) is None
    assert known(None, 7, None, 7) is None


def test_the_upper_quartile_counts():
    assert known(10, 10, 10, 10) == 10
    assert known(1, 2, 3, 4, 5, 6, 7, 8) == 7
    assert known(*[100] * 15, 10**9) == 100, "one burst"
    assert known(*[1] * 6, *[100] * 6) == 100, "a receiver that was late"


def test_readings_of_something_else_are_forgotten():
    assert known(7, 7, 7, 0) is None
    assert known(7, 7, 7, 0, 5, 5, 5) == 5


def test_a_link_that_changes_is_measured_again():
    assert known(*[10**9] * 16, *[10**6] * 16) == 10**6
