"""Tests that the kernel reports the rate of the connection that took a message."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest

from dask_gpurt.transport import host_readings
from dask_gpurt.transport.host_readings import LEAST_NBYTES, HostReadings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel says so")

HOST = "127.0.0.1"
MESSAGE_NBYTES = 1 << 20


def looked(host=HOST, not_ports=()):
    """Return readings that have scanned once, and so know the earlier counts of all connections."""
    readings = HostReadings(host, not_ports)
    assert readings.after(MESSAGE_NBYTES) is None
    return readings


class Connection:
    """Both ends of a connection in this process."""

    def __init__(self, server: socket.socket) -> None:
        self.ours = socket.create_connection(server.getsockname()[:2])
        self.theirs, _ = server.accept()
        self.port = server.getsockname()[1]

    def carry(self, nbytes: int = MESSAGE_NBYTES) -> None:
        while nbytes:
            piece = min(nbytes, 1 << 16)
            self.ours.sendall(bytes(piece))
            nbytes -= piece
            while piece:
                piece -= len(self.theirs.recv(piece))

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture(autouse=True)
def put_to_the_test(monkeypatch):
    """Make the kernel report a rate; by itself that depends on timing."""
    rates = []

    def rate_of(info):
        rates.append(int.from_bytes(info[160:168], sys.byteorder))
        return rates[-1]

    monkeypatch.setattr(host_readings, "delivery_rate", rate_of)
    return rates


@pytest.fixture
def connect():
    """Return a function that connects to a host."""
    with contextlib.ExitStack() as stack:

        def make(host: str = HOST) -> Connection:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = stack.enter_context(socket.create_server((host, 0), family=family))
            made = Connection(server)
            stack.callback(made.close)
            return made

        yield make


def test_connection_that_carried_a_message_is_found(connect, put_to_the_test):
    idle, busy = connect(), connect()
    idle.carry()
    readings = looked()
    busy.carry()
    rate = readings.after(MESSAGE_NBYTES)
    assert rate == max(put_to_the_test)
    assert len(put_to_the_test) == 1, "one connection carried it"
    assert 10**6 < rate < 10**12


def test_bytes_before_the_first_scan_do_not_count(connect):
    connection = connect()
    readings = looked()
    connection.carry()
    assert readings.after(MESSAGE_NBYTES)
    assert readings.after(MESSAGE_NBYTES) is None
    # The missing bytes were in flight; the next reading includes them.
    connection.carry(2 * MESSAGE_NBYTES)
    assert readings.after(MESSAGE_NBYTES)


def test_a_new_connection_needs_a_second_message(connect, monkeypatch):
    monkeypatch.setattr(host_readings, "_N_FIRST_SCANS", 3)
    readings = looked()
    late = connect()
    late.carry()
    assert readings.after(MESSAGE_NBYTES) is None
    late.carry()
    assert readings.after(MESSAGE_NBYTES)


@pytest.mark.parametrize("share", [0.25, 4])
def test_a_connection_that_took_another_amount_is_no_carrier(connect, share):
    connection = connect()
    readings = looked()
    connection.carry(int(share * MESSAGE_NBYTES))
    assert readings.after(MESSAGE_NBYTES) == 0


def test_small_messages_prove_nothing(connect):
    connection = connect()
    readings = looked()
    connection.carry(LEAST_NBYTES)
    assert readings.after(LEAST_NBYTES - 1) is None
    assert readings.after(LEAST_NBYTES)


def test_connections_at_excluded_ports_are_ignored(connect):
    """Connections are excluded by the port of either end."""
    busy = connect()
    for _ in range(2):
        readings = looked(not_ports={busy.port})
        busy.carry()
        assert readings.after(MESSAGE_NBYTES) == 0
        # Now from the end that listened.
        busy.ours, busy.theirs = busy.theirs, busy.ours


def test_connections_to_other_hosts_are_ignored(connect):
    connection = connect("127.0.0.2")
    one, other = looked(), looked("127.0.0.2")
    connection.carry()
    assert one.after(MESSAGE_NBYTES) == 0
    assert other.after(MESSAGE_NBYTES)


def test_a_host_is_recognised_in_the_other_address_family():
    """A dual-stack socket shows IPv4 addresses mapped to IPv6."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no sockets for both families here")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        ours = socket.create_connection((HOST, server.getsockname()[1]))
        theirs, _ = server.accept()
        with ours, theirs:
            connection = Connection.__new__(Connection)
            connection.ours, connection.theirs = theirs, ours
            assert theirs.getpeername()[0] == f"::ffff:{HOST}"
            readings = looked()
            connection.carry()
            assert readings.after(MESSAGE_NBYTES)


def test_a_reused_descriptor_is_no_carrier_any_more(connect, tmp_path):
    old = connect()
    readings = looked()
    old.carry()
    assert readings.after(MESSAGE_NBYTES)
    number = old.ours.fileno()
    old.close()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.dup2(file, number)
    try:
        assert readings.after(MESSAGE_NBYTES) is None
    finally:
        for each in {file, number}:
            os.close(each)


def test_sockets_stay_open_and_unchanged(connect):
    connection = connect()
    readings = looked()
    connection.ours.settimeout(5.0)
    for _ in range(3):
        connection.carry()
        assert readings.after(MESSAGE_NBYTES)
    assert connection.ours.gettimeout() == 5.0
    connection.carry()


def test_scans_without_a_result_become_rarer(monkeypatch):
    monkeypatch.setattr(host_readings, "_FIRST_PAUSE_NBYTES", 2 * MESSAGE_NBYTES)
    readings = HostReadings(HOST, ())
    found = []
    for number in range(40):
        is_quick = readings.is_quick(MESSAGE_NBYTES)
        reading = readings.after(MESSAGE_NBYTES)
        assert is_quick == (reading is None and number > 0)
        if reading == 0:
            found.append(number)
    assert found == [1, 3, 7, 15, 31]


def test_a_carrier_that_stops_starts_a_new_scan(connect, monkeypatch):
    monkeypatch.setattr(host_readings, "_FIRST_PAUSE_NBYTES", 3 * MESSAGE_NBYTES)
    one, other = connect(), connect()
    readings = looked()
    one.carry()
    assert readings.after(MESSAGE_NBYTES)
    for reading in (None, None):
        other.carry()
        assert readings.after(MESSAGE_NBYTES) is reading
        assert other.ours.fileno() not in readings._carriers
    other.carry()
    assert readings.after(MESSAGE_NBYTES)
    assert readings._carriers == [other.ours.fileno()]


def test_no_scan_where_the_system_reports_nothing(monkeypatch, connect):
    connection = connect()
    monkeypatch.setattr(sys, "platform", "darwin")
    readings = looked()
    connection.carry()
    assert readings.after(MESSAGE_NBYTES) == 0


def test_no_scan_if_it_would_change_the_blocking_mode_of_sockets(connect):
    """Python sets the default timeout on a socket object made of a foreign descriptor."""
    connection = connect()
    readings = looked()
    connection.carry()
    assert readings.after(MESSAGE_NBYTES)
    socket.setdefaulttimeout(30.0)
    try:
        connection.carry()
        assert readings.after(MESSAGE_NBYTES) is None
    finally:
        socket.setdefaulttimeout(None)
    assert connection.ours.getblocking()
    assert os.get_blocking(connection.ours.fileno())
