"""The kernel is asked of the connection that took a message, whoever made it."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from dask_gpurt.transport import host_readings
from dask_gpurt.transport.host_readings import HostReadings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel says so")

HOST = "127.0.0.1"
MESSAGE_NBYTES = 1 << 20


class Connection:
    """Both ends of one, in this process."""

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
    """Whether the kernel thinks that the sender held it down depends on its timing."""
    rates = []

    def rate_of(info):
        rates.append(int.from_bytes(info[160:168], sys.byteorder))
        return rates[-1]

    monkeypatch.setattr(host_readings, "delivery_rate", rate_of)
    return rates


@pytest.fixture
def connect():
    """Makes connections to a host."""
    with contextlib.ExitStack() as stack:

        def make(host: str = HOST) -> Connection:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = stack.enter_context(socket.create_server((host, 0), family=family))
            made = Connection(server)
            stack.callback(made.close)
            return made

        yield make


def test_the_connection_that_took_the_message_is_found(connect, put_to_the_test):
    idle, busy = connect(), connect()
    idle.carry()
    readings = HostReadings(HOST, ())
    busy.carry()
    rate = readings.after(MESSAGE_NBYTES)
    assert rate == max(put_to_the_test)
    assert len(put_to_the_test) == 1, "one connection carried it"
    assert 10**6 < rate < 10**12


def test_what_went_before_does_not_count(connect):
    connection = connect()
    connection.carry(4 * MESSAGE_NBYTES)
    readings = HostReadings(HOST, ())
    assert readings.after(MESSAGE_NBYTES) is None
    connection.carry()
    assert readings.after(MESSAGE_NBYTES)
    assert readings.after(MESSAGE_NBYTES) is None


def test_one_that_is_made_later_is_found(connect):
    readings = HostReadings(HOST, ())
    connect().carry()
    assert readings.after(MESSAGE_NBYTES)


def test_one_that_took_little_of_it_is_not_meant(connect):
    readings = HostReadings(HOST, ())
    connect().carry(MESSAGE_NBYTES // 4)
    assert readings.after(MESSAGE_NBYTES) is None


def test_connections_of_others_are_left_out(connect):
    """By their port, whichever end it is at."""
    busy = connect()
    readings = HostReadings(HOST, {busy.port})
    busy.carry()
    assert readings.after(MESSAGE_NBYTES) is None
    # The other way, from the end that listened.
    busy.ours, busy.theirs = busy.theirs, busy.ours
    busy.carry()
    assert readings.after(MESSAGE_NBYTES) is None


def test_connections_to_other_hosts_are_left_out(connect):
    one, other = HostReadings(HOST, ()), HostReadings("127.0.0.2", ())
    connect("127.0.0.2").carry()
    assert one.after(MESSAGE_NBYTES) is None
    assert other.after(MESSAGE_NBYTES)


def test_a_host_is_known_in_the_other_family_too():
    """A socket for both families shows addresses of the old one in the new one's form."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no sockets for both families here")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        ours = socket.create_connection((HOST, server.getsockname()[1]))
        theirs, _ = server.accept()
        with ours, theirs:
            connection = Connection.__new__(Connection)
            connection.ours, connection.theirs = theirs, ours
            assert theirs.getpeername()[0] == f"::ffff:{HOST}"
            readings = HostReadings(HOST, {ours.getsockname()[1] + 1})
            connection.carry()
            assert readings.after(MESSAGE_NBYTES)


def test_a_descriptor_that_is_another_file_s_is_forgotten(connect, tmp_path):
    old = connect()
    readings = HostReadings(HOST, ())
    old.carry()
    assert readings.after(MESSAGE_NBYTES)
    number = old.ours.fileno()
    old.close()
    with (tmp_path / "file").open("w") as file:
        assert file.fileno() <= number
        assert readings.after(MESSAGE_NBYTES) is None
        connect().carry(2 * MESSAGE_NBYTES)
        assert readings.after(2 * MESSAGE_NBYTES)


def test_sockets_stay_open_and_as_they_were(connect):
    connection = connect()
    readings = HostReadings(HOST, ())
    for _ in range(3):
        connection.carry()
        readings.after(MESSAGE_NBYTES)
    connection.ours.settimeout(5.0)
    connection.carry()
    assert connection.ours.gettimeout() == 5.0


def test_where_nothing_is_found_it_is_looked_for_ever_more_rarely(monkeypatch):
    looks = []

    def descriptors():
        looks.append(True)
        return []

    monkeypatch.setattr(host_readings, "_descriptors", descriptors)
    readings = HostReadings(HOST, ())
    at = []
    for number in range(40):
        before = len(looks)
        assert readings.after(MESSAGE_NBYTES) is None
        if len(looks) > before:
            at.append(number)
    assert at == [0, 2, 6, 14, 30]


@pytest.mark.parametrize(
    "name, value", [("sys.platform", "darwin"), ("socket.getdefaulttimeout", lambda: 1.0)]
)
def test_no_look_where_that_would_change_something_or_tell_nothing(
    monkeypatch, connect, name, value
):
    monkeypatch.setattr(name, value)
    readings = HostReadings(HOST, ())
    connect().carry()
    assert readings.after(MESSAGE_NBYTES) is None
