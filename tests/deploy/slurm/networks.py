"""Two network namespaces of this machine, joined by a bridge: to Dask they are two hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.deploy.slurm.throwaway import Node


class Networks(NamedTuple):
    """Nodes in networks of their own, and this machine's own end of the bridge."""

    nodes: list[Node]
    bridge: str
    address: str


@contextlib.contextmanager
def two_networks() -> Iterator[Networks]:
    """Make the namespaces; skip the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    # Names of interfaces have at most 15 characters.
    mine = f"gp{os.getpid()}"
    subnet = f"10.213.{os.getpid() % 256}"
    bridge, address = f"{mine}b", f"{subnet}.254"
    with contextlib.ExitStack() as stack:
        _add(stack, bridge, "link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{address}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        nodes = [_node(stack, number, f"{mine}n{number}", bridge, subnet) for number in (1, 2)]
        yield Networks(nodes, bridge, address)


def _node(stack: contextlib.ExitStack, number: int, name: str, bridge: str, subnet: str) -> Node:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)
    _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", name, "master", bridge, "up")
    _ip("-n", name, "addr", "add", f"{subnet}.{number}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    return Node(f"n{number}", f"{subnet}.{number}", ("ip", "netns", "exec", name))


def _add(stack: contextlib.ExitStack, interface: str, *arguments: str) -> None:
    try:
        _ip(*arguments)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network of its own: {error.stderr.strip()}")
    stack.callback(_ip, "link", "del", interface)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
