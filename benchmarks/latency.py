"""A way between two network namespaces on which every packet takes some time.

Kernels without `netem` can shape a link's rate and not its latency. So this process carries the
packets. Each namespace has a TUN device, into which packets for the other host go. They come out
of the other device later. The rate has no limit but that of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
#: The largest packets, so that this process carries few.
_MTU = 65520
_DEVICE = "gpurt-tun"
#: Bytes on the way; beyond them, packets wait in the device, as TCP expects of a link.
_WINDOW_NBYTES = 8 << 20


@contextlib.contextmanager
def slow_way(ends: list[tuple[str, str]], one_way_s: float) -> Iterator[None]:
    """Send packets between two hosts by a way of this latency.

    Parameters
    ----------
    ends
        Name of the namespace and address of both hosts.
    """
    (one, here), (other, there) = ends
    command = [sys.executable, "-m", "benchmarks.latency", one, here, other, there]
    process = subprocess.Popen([*command, str(one_way_s)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the way between the hosts did not start")
        yield
    finally:
        process.terminate()  # its devices and routes go with it
        process.wait()


def _tun_in(namespace: str, here: str, there: str) -> int:
    """Make a TUN device in a namespace, on the way to an address; return its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    target = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(target, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(device, _TUNSETIFF, request)
        for words in (
            f"link set {_DEVICE} mtu {_MTU} txqueuelen 5000 up",
            f"route add {there}/32 dev {_DEVICE} src {here}",
        ):
            subprocess.run(["ip", *words.split()], check=True)
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(home)
        os.close(target)
    return device


def _carry(source: int, target: int, one_way_s: float) -> None:
    """Write the packets of one device to another one, each after its time."""
    under_way: deque[tuple[float, bytes]] = deque()
    nbytes = 0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else None
        is_open = nbytes < _WINDOW_NBYTES
        ready, _, _ = select.select([source] if is_open else [], [], [], wait_s)
        if ready:
            packet = os.read(source, _MTU + 64)
            under_way.append((time.perf_counter() + one_way_s, packet))
            nbytes += len(packet)
        while under_way and under_way[0][0] <= time.perf_counter():
            _, packet = under_way.popleft()
            nbytes -= len(packet)
            with contextlib.suppress(BlockingIOError):  # a full queue drops, as a switch does
                os.write(target, packet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("namespace", "address", "other_namespace", "other_address"):
        parser.add_argument(name)
    parser.add_argument("one_way_s", type=float)
    given = parser.parse_args()
    one = _tun_in(given.namespace, given.address, given.other_address)
    other = _tun_in(given.other_namespace, given.other_address, given.address)
    threads = [
        threading.Thread(target=_carry, args=(*pair, given.one_way_s))
        for pair in ((one, other), (other, one))
    ]
    for thread in threads:
        thread.start()
    print("ready", flush=True)


if __name__ == "__main__":
    main()
