"""Tests of the paths to a peer: runs share them, and a failure of one run stays with that run."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dask_gpurt.devices.host_memory.pages import SharedPages
from dask_gpurt.devices.host_memory.pool import HostPool
from dask_gpurt.devices.lanes import Lane
from dask_gpurt.errors import (
    ConfigError,
    DamagedError,
    LateError,
    ProtocolError,
    TransportError,
)
from dask_gpurt.plugins.shuffle.transport_choice import DAMAGED, LEAST_THREAD_NBYTES, Links
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport import shared
from dask_gpurt.transport.ucx import UcxEngine
from tests.codecs.test_nvcomp import emulated
from tests.transport.test_ucx import needs_ucxx
from tests.transport.ucx_peer import open_door

DEADLINE_S = 20.0


class RunIsOver(Exception):
    pass


async def compose(path):
    return Message(b"", [])


def with_links(test, **more):
    """Run a coroutine function with the links of a worker with these attributes, on its loop."""

    async def main():
        loop = SimpleNamespace(asyncio_loop=asyncio.get_running_loop())
        rpc = SimpleNamespace(available={}, occupied={})
        links = Links(SimpleNamespace(loop=loop, rpc=rpc, **more), 0)
        if links._lender is None:
            pytest.skip("no files in memory here, and so nothing is asked of a peer")
        try:
            await test(links)
        finally:
            await links.disconnect()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_run_that_ends_during_a_negotiation_fails_no_other_run():
    async def test(links):
        asked, refuse = asyncio.Event(), asyncio.Event()
        answered = []

        async def of_the_old_run(data):
            asked.set()
            await refuse.wait()
            raise RunIsOver

        async def of_the_new_run(data):
            answered.append("offers" in data)
            return {"status": "OK", "ours": None, "why_not": None}

        old = asyncio.create_task(links.deliver("peer", "auto", compose, of_the_old_run))
        await asked.wait()
        new = asyncio.create_task(links.deliver("peer", "auto", compose, of_the_new_run))
        await asyncio.sleep(0)  # it waits for the answer to the old run's question
        assert answered == []
        refuse.set()
        with pytest.raises(RunIsOver):
            await old
        await new
        assert answered == [True, False]

    with_links(test)


def test_a_link_that_fails_without_waiting_callers_is_not_logged():
    complaints = []

    async def test(links):
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: complaints.append(what))
        asked, refuse = asyncio.Event(), asyncio.Event()

        async def call(data):
            asked.set()
            await refuse.wait()
            raise OSError("the pool of connections is closing")

        waiting = asyncio.create_task(links.deliver("peer", "auto", compose, call))
        await asked.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
        (linking,) = links._paths.values()
        refuse.set()
        await asyncio.wait({linking})
        links._paths.clear()
        del linking
        gc.collect()

    with_links(test)
    assert complaints == []


def test_a_link_that_fails_does_not_keep_the_message_alive():
    async def test(links):
        async def call(data):
            raise OSError("no route to host")

        async def attempt():
            buffer = np.zeros(10, dtype=np.uint8)

            async def compose(path):
                return Message(b"", [buffer])

            with pytest.raises(OSError, match="no route"):
                await links.deliver("peer", "auto", compose, call)
            return weakref.ref(buffer)

        kept = await attempt()
        await asyncio.sleep(0)  # the loop still references the callback that woke this task
        gc.collect()
        assert kept() is None

    with_links(test)


def test_a_run_has_its_own_error():
    async def test(links):
        async def call(data):
            raise RunIsOver

        with pytest.raises(RunIsOver):
            await links.deliver("peer", "auto", compose, call)

    with_links(test)


# ------------------------------------------------------------------ a path on which nothing arrives


class Deaf:
    """A peer whose engine receives nothing, and that accepts messages on other paths."""

    def __init__(self, engine, is_silent):
        self._engine = engine
        self._is_silent = is_silent

    async def call(self, data):
        if "offers" in data:
            is_ucx = "ucx" in data["offers"]
            ours, why_not = (self._engine.descriptor, None) if is_ucx else (None, "elsewhere")
            return {"status": "OK", "ours": ours, "why_not": why_not}
        if isinstance(data["payload"], list):
            return {"status": "OK"}
        if self._is_silent:
            await asyncio.Event().wait()
        return {"status": "relink"}


def noting(taken):
    """Return a function that composes slow UCX messages and records the path of each."""

    async def compose(path):
        taken.append(path.name)
        return Message(b"", [np.zeros(1 << 20, dtype=np.uint8)])

    return compose


def with_links_to_the_deaf(test, *, is_silent):
    """Run a coroutine function with the links of a worker, and the calls of a deaf peer."""

    async def with_engine(links):
        engine = await open_door(await UcxEngine.start("127.0.0.1"))
        try:
            await test(links, Deaf(engine, is_silent).call)
        finally:
            await links.ucx.close(DEADLINE_S)
            await engine.close(DEADLINE_S)

    with_links(with_engine, security=OPEN, address="tcp://127.0.0.1:1", ip="127.0.0.1")


@needs_ucxx
@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "asks for another link"])
def test_auto_stops_using_ucx_to_a_peer_that_it_does_not_reach(monkeypatch, is_silent):
    monkeypatch.setattr("dask_gpurt.plugins.shuffle.transports.MESSAGE_DEADLINE_S", 0.1)
    taken = []
    compose = noting(taken)

    async def test(links, call):
        if is_silent:
            with pytest.raises(LateError, match="not done within"):
                await links.deliver("peer", "auto", compose, call)
        await links.deliver("peer", "auto", compose, call)
        assert taken == (["ucx", "comm"] if is_silent else ["ucx", "ucx", "comm"])
        why_not = "not done within 0.1 s" if is_silent else "the peer could not receive"
        assert why_not in links.report()["peer"]["why_not"]["ucx"]
        # An explicit setting still uses UCX, and so does `auto` after the next cool-down.
        with pytest.raises(TransportError):
            await links.deliver("peer", "ucx", compose, call)
        links.cool_down()
        assert (await links._path("peer", "auto", call)).name == "ucx"

    with_links_to_the_deaf(test, is_silent=is_silent)


@needs_ucxx
def test_a_link_over_ucx_may_break_once_and_is_not_made_for_ever(monkeypatch):
    taken = []
    compose = noting(taken)

    async def test(links, call):
        here = await links.ucx.engine()

        async def breaking(peer, *message):
            await here.disconnect(peer)
            return await UcxEngine.send(here, peer, *message)

        monkeypatch.setattr(here, "send", breaking)
        for _ in range(2):
            with pytest.raises(TransportError, match="no UCX link"):
                await links.deliver("peer", "auto", compose, call)
        await links.deliver("peer", "auto", compose, call)
        assert taken == ["ucx", "ucx", "comm"]
        assert "no UCX link" in links.report()["peer"]["why_not"]["ucx"]

    with_links_to_the_deaf(test, is_silent=True)


# ------------------------------------------------------------------ memory of a peer


class Peer:
    """A peer that lends buffers of these sizes, and sends three bytes more in its message."""

    def __init__(self, *sizes):
        memory = SharedPages()
        self._lender = shared.Lender(memory)
        pool = HostPool(0, source=memory)
        self.lengths = [*sizes, 3]
        self.lent = [pool.empty(nbytes, lane="outgoing") for nbytes in sizes]
        for number, buffer in enumerate(self.lent, 1):
            buffer[:] = number
        self.offer = {"shared": self._lender.descriptor}
        places = [self._lender.place(buffer) for buffer in self.lent]
        token = self._lender.descriptor["token"]
        self.payload = {"by": "shared", "token": token, "places": [*places, b"end"]}
        self.sign()

    def sign(self):
        self.payload["seal"] = shared.seal(self.payload["token"], self.payload["places"])

    def fetched_by(self, links, beside):
        return links.fetch(self.payload, self.lengths, empty, beside)

    def assert_equal(self, buffers):
        assert [bytes(buffer) for buffer in buffers] == [*map(bytes, self.lent), b"end"]


def empty(number, nbytes):
    return np.empty(nbytes, dtype=np.uint8)


async def never(nbytes, read):
    raise AssertionError("not worth a thread")


def in_lane(lane, asked):
    async def beside(nbytes, read):
        asked.append(nbytes)
        await asyncio.wrap_future(lane.submit(read))

    return beside


def test_a_large_message_is_read_in_a_thread_and_a_small_one_on_the_loop():
    async def test(links):
        large = Peer(LEAST_THREAD_NBYTES - 100_000, 100_000 - 3)
        small = Peer(LEAST_THREAD_NBYTES - 100_000, 100_000 - 4)
        asked = []
        with Lane("beside") as lane:
            for peer in (large, small):
                assert (await links.accept(peer.offer))["why_not"] is None
            large.assert_equal(await large.fetched_by(links, in_lane(lane, asked)))
            small.assert_equal(await small.fetched_by(links, never))
        assert asked == [LEAST_THREAD_NBYTES]

    with_links(test)


def test_an_incomplete_message_is_not_read_at_all():
    async def test(links):
        peer = Peer(LEAST_THREAD_NBYTES)
        peer.payload["places"][-1] = b"too long"
        peer.sign()
        await links.accept(peer.offer)
        with pytest.raises(ProtocolError, match="received 8 of 3 bytes"):
            await peer.fetched_by(links, never)

    with_links(test)


#: Smaller buffers are not in shared memory.
PLACED_NBYTES = 100_000


@pytest.mark.parametrize(
    "damaged",
    [
        lambda place, end: [[(place - 64, PLACED_NBYTES)], end],
        lambda place, end: [[(place, PLACED_NBYTES - 1), (place, 1)], end],
        lambda place, end: [[(place, PLACED_NBYTES)], b"enD"],
        lambda place, end: [[(place, PLACED_NBYTES)], end, b""],
        lambda place, end: [end, [(place, PLACED_NBYTES)]],
    ],
    ids=["elsewhere", "cut otherwise", "other bytes", "one more", "another order"],
)
def test_damaged_places_are_not_read(damaged):
    """Damaged places may be inside the lent memory, and lead to other rows."""

    async def test(links):
        peer = Peer(PLACED_NBYTES)
        await links.accept(peer.offer)
        [[(place, nbytes)], end] = peer.payload["places"]
        assert nbytes == PLACED_NBYTES
        peer.payload["places"] = damaged(place, end)
        with pytest.raises(DamagedError, match="damaged on their way"):
            await peer.fetched_by(links, never)

    with_links(test)


@pytest.mark.parametrize("parts", [None, 7, [None], ["text"], [[("a", 1)]], [[(-1, 1)]]])
def test_malformed_places_are_refused(parts):
    async def test(links):
        peer = Peer(PLACED_NBYTES)
        await links.accept(peer.offer)
        peer.payload["places"] = parts
        with pytest.raises(ProtocolError):
            await peer.fetched_by(links, never)

    with_links(test)


def test_a_read_without_a_waiting_caller_finishes(monkeypatch):
    begun, may_go_on = threading.Event(), threading.Event()
    read_into = shared._read_into

    def held(*args):
        begun.set()
        assert may_go_on.wait(DEADLINE_S)
        read_into(*args)

    monkeypatch.setattr(shared, "_read_into", held)

    async def test(links):
        peer = Peer(LEAST_THREAD_NBYTES)
        await links.accept(peer.offer)
        with Lane("beside") as lane:
            jobs = []

            async def beside(nbytes, read):
                jobs.append(lane.submit(read))
                await asyncio.wrap_future(jobs[0])

            fetching = asyncio.create_task(peer.fetched_by(links, beside))
            assert await asyncio.to_thread(begun.wait, DEADLINE_S)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await links.disconnect()
            may_go_on.set()
            assert jobs[0].result(DEADLINE_S) is None

    try:
        with_links(test)
    finally:
        may_go_on.set()


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
    monkeypatch.setattr("dask_gpurt.plugins.shuffle.worker_ucx.ucx.why_not", lambda: missing)

    async def fail(host):
        raise start

    async def test(links):
        if start is not None:
            monkeypatch.setattr(Engine, "start", fail)
            assert (await links.accept({"ucx": {}}))["ours"] is None
        assert links.lacks() == lacks

    security = SimpleNamespace(require_encryption=encrypted)
    with_links(test, security=security, address="tcp://10.0.0.3:4567", ip="10.0.0.3")


def test_a_worker_without_shared_memory_reports_it_as_missing(monkeypatch):
    def no_files():
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("dask_gpurt.plugins.shuffle.transport_choice.SharedPages", no_files)
    worker = SimpleNamespace(loop=SimpleNamespace(asyncio_loop=None), address="tcp://a:1")
    links = Links(SimpleNamespace(**vars(worker), security=OPEN), 0)
    assert links.lacks()["shared"] == "no files in memory here (Function not implemented)"


# ------------------------------------------------------------------ codecs of devices


def asked_of(answer):
    """Return the questions to a peer that gives this answer, and the resulting codecs."""
    asked = []

    async def test(links):
        async def call(data):
            asked.extend(data.get("offers", {}))
            return {"status": "OK", "ours": answer, "why_not": None if answer else "unknown"}

        await links.deliver("peer", "comm", composed, call)

    found = []

    async def composed(path):
        found.append(path.device_codecs)
        return await compose(path)

    with_links(test)
    return asked, found[0]


@pytest.mark.parametrize(
    "theirs, both", [([128, 129], {128, 129}), ([129, 200], {129}), ([], set()), (None, set())]
)
def test_codecs_of_devices_are_used_where_both_have_them(monkeypatch, theirs, both):
    with emulated(monkeypatch):
        assert asked_of(theirs) == (["codecs"], both)


def test_a_worker_without_device_codecs_does_not_ask_its_peer():
    assert asked_of([128]) == ([], set())


def test_a_peer_that_answers_something_else_is_an_error(monkeypatch):
    with emulated(monkeypatch), pytest.raises(ProtocolError, match="codecs 7"):
        asked_of(7)


def test_a_worker_says_which_codecs_of_devices_it_has(monkeypatch):
    async def test(links):
        said.append((await links.accept({"codecs": None}))["ours"])

    said = []
    with_links(test)
    with emulated(monkeypatch):
        with_links(test)
    assert said == [[], [128, 129]]


# ------------------------------------------------------------------ where peers reach our engine

NAMED = {"address": "tcp://worker-3:4567", "ip": "worker-3"}
OPEN = SimpleNamespace(require_encryption=False)


class Engine:
    """An engine with the address that it was started with."""

    takes_device_memory = False
    is_closing = False

    def __init__(self, host):
        self.descriptor = {"host": host}

    @classmethod
    async def start(cls, host):
        return cls(host)

    async def close(self, deadline_s):
        pass

    async def invite(self, token, deadline_s):
        return self.descriptor


def resolving(monkeypatch, *addresses, error=None):
    """Replace the resolver; return the names it was asked for, and in which threads."""
    asked = []

    def getaddrinfo(name, *args, **kwargs):
        asked.append((name, threading.current_thread()))
        if error is not None:
            raise error
        return [(None, None, None, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("dask_gpurt.plugins.shuffle.worker_ucx.UcxEngine", Engine)
    return asked


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
def test_others_need_no_resolver(monkeypatch, address, ip, host):
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
        # It may have an address later.
        resolving(monkeypatch, "10.0.0.3")
        assert (await links.accept({"ucx": {}}))["ours"]["host"] == "10.0.0.3"

    with_links(test, security=OPEN, **NAMED)


@pytest.mark.parametrize("n_damaged", [1, 2, 3])
def test_a_message_that_arrives_damaged_three_times_is_a_clear_error(n_damaged):
    async def test(links):
        sent = []

        async def call(data):
            if "offers" in data:
                return {"status": "OK", "ours": None, "why_not": None}
            sent.append(data)
            return {"status": DAMAGED if len(sent) <= n_damaged else "OK"}

        delivery = links.deliver("tcp://peer:1", "auto", compose, call)
        if n_damaged < 3:
            await delivery
            assert len(sent) == n_damaged + 1
            return
        with pytest.raises(DamagedError, match="3 times in a row a message to tcp://peer:1"):
            await delivery
        assert len(sent) == 3

    with_links(test)


def test_an_error_of_the_second_attempt_does_not_keep_the_message_of_the_first():
    async def test(links):
        made = []

        async def compose_once(path):
            if made:
                raise RunIsOver
            buffer = np.zeros(10, dtype=np.uint8)
            made.append(weakref.ref(buffer))
            return Message(b"", [buffer])

        async def call(data):
            return {"status": DAMAGED}

        with pytest.raises(RunIsOver) as error:
            await links.deliver("peer", "comm", compose_once, call)
        assert made[0]() is None
        del error

    with_links(test)


@pytest.mark.parametrize(
    ("transport", "stays"), [("auto", True), ("comm", False), ("device", False)]
)
def test_on_host_has_only_peers_whose_path_is_known(transport, stays):
    async def test(links):
        async def call(data):
            return {"status": "OK", "ours": None, "why_not": None}

        assert links.on_host("auto") == set()
        await links.deliver("peer", "auto", compose, call)
        assert links.on_host(transport) == ({"peer"} if stays else set())

    with_links(test)
