"""A worker gives peers an address at which they can reach its UCX engine."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from dask_gpurt.errors import (
    ConfigError,
    TransportError,
)
from tests.plugins.shuffle.links_rig import OPEN, Engine, compose, resolving, with_links

# ------------------------------------------------------------------ before anything is sent


@pytest.mark.parametrize(
    "encrypted, missing, start, lacks",
    [
        (False, None, None, {}),
        (False, "no UCX without ucxx", None, {"ucx": "no UCX without ucxx"}),
        (True, None, None, {"ucx": "the cluster's connections are encrypted, and UCX's are not"}),
        (False, None, TransportError("no device"), {"ucx": "no device"}),
    ],
)
def test_a_worker_reports_missing_paths_by_itself(monkeypatch, encrypted, missing, start, lacks):
    resolving(monkeypatch)
    monkeypatch.setattr("dask_gpurt.transport.ucx.engine.why_not", lambda: missing)

    async def fail(host):
        raise start

    async def test(links):
        if start is not None:
            monkeypatch.setattr(Engine, "start", fail)
            assert (await links.accept({"ucx": {}}))["ours"] is None
        assert links.lacks() == lacks

    security = SimpleNamespace(require_encryption=encrypted)
    with_links(test, security=security, address="tcp://10.0.0.3:4567", ip="10.0.0.3")


# ------------------------------------------------------------------ where peers reach our engine


NAMED = {"address": "tcp://worker-3:4567", "ip": "worker-3"}


@pytest.mark.parametrize(
    "addresses, host",
    [
        (["10.0.0.3", "10.0.0.4"], "10.0.0.3"),
        (["127.0.1.1", "fd00::3"], "fd00::3"),
        (["fd00::3", "10.0.0.4"], "10.0.0.4"),
        (["127.0.1.1"], "127.0.1.1"),
    ],
)
def test_a_worker_with_a_host_name_is_reached_at_its_address(monkeypatch, addresses, host):
    asked = resolving(monkeypatch, *addresses)

    async def test(links):
        answer = await links.accept({"ucx": {}})
        assert answer["ours"]["host"] == host
        ((name, thread),) = asked
        assert name == "worker-3"
        assert thread is not threading.current_thread(), "the loop waits for a resolver"

    with_links(test, security=OPEN, **NAMED)


@pytest.mark.parametrize(
    "address, ip, host",
    [
        ("tcp://10.0.0.3:4567", "10.0.0.3", "10.0.0.3"),
        ("tcp://[fd00::3]:4567", "fd00::3", "fd00::3"),
        ("inproc://somewhere/1/2", "somewhere", "127.0.0.1"),
    ],
)
def test_numeric_addresses_need_no_resolver(monkeypatch, address, ip, host):
    asked = resolving(monkeypatch, error=AssertionError("not to be asked"))

    async def test(links):
        assert (await links.accept({"ucx": {}}))["ours"]["host"] == host
        assert asked == []

    with_links(test, security=OPEN, address=address, ip=ip)


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        UnicodeError("label empty or too long"),
    ],
)
def test_a_host_name_without_an_address_rules_out_ucx(monkeypatch, error):
    resolving(monkeypatch, error=error)

    async def test(links):
        refused = (await links.accept({"ucx": {}}))["why_not"]
        assert "'worker-3' has none" in refused
        assert str(error) in refused

        async def call(data):
            if "offers" in data:
                return {"ours": None, "why_not": "out of view"}
            return {"status": "OK"}

        await links.deliver("peer", "auto", compose, call)
        (path,) = links.report().values()
        assert (path["path"], path["why_not"]["ucx"]) == ("comm", refused)
        with pytest.raises(ConfigError, match="'worker-3' has none"):
            await links.deliver("peer", "ucx", compose, call)
        # The name may resolve to an address later.
        resolving(monkeypatch, "10.0.0.3")
        assert (await links.accept({"ucx": {}}))["ours"]["host"] == "10.0.0.3"

    with_links(test, security=OPEN, **NAMED)
