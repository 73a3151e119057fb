"""Transports to a peer are shared between runs; one run's failure is not another's."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from dask_gpurt.errors import (
    LateError,
    ProtocolError,
    TransportError,
)
from dask_gpurt.plugins.shuffle.peer_links import Links
from dask_gpurt.shuffle.messages import Message
from dask_gpurt.transport.ucx.engine import UcxEngine
from tests.codecs.test_nvcomp import emulated
from tests.limits import HANG_S
from tests.plugins.shuffle.links_rig import OPEN, RunIsOver, compose, with_links
from tests.transport.ucx_peer import invite_anybody
from tests.transport.ucx_processes import needs_ucxx


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
        await asyncio.sleep(0)  # `new` waits for the answer to the old run's question
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


def test_error_of_a_run_is_raised_unchanged():
    async def test(links):
        async def call(data):
            raise RunIsOver

        with pytest.raises(RunIsOver):
            await links.deliver("peer", "auto", compose, call)

    with_links(test)


# ------------------------------------------------------------------ one question for each host


class Elsewhere:
    """Peers of another host. They answer an offer once the test lets them."""

    def __init__(self):
        self.offers, self.may_answer = [], asyncio.Event()

    def call(self, address):
        async def call(data):
            if "offers" not in data:
                return {"status": "OK"}
            self.offers.append(address)
            await self.may_answer.wait()
            return {"status": "OK", "ours": None, "why_not": "another host"}

        return call

    async def deliver_to(self, links, addresses):
        """Send a message to each peer at the same time; return their paths."""
        sends = (links.deliver(peer, "auto", compose, self.call(peer)) for peer in addresses)
        await asyncio.gather(*sends)
        return [links.report()[peer]["path"] for peer in addresses]


#: UCX is not used for such workers.
ENCRYPTED = SimpleNamespace(require_encryption=True)
THERE = [f"tcp://10.0.0.2:{port}" for port in range(4000, 4008)]
HERE = [f"tcp://127.0.0.1:{port}" for port in range(4000, 4003)]


def test_one_worker_of_another_host_is_asked_for_all():
    async def test(links):
        peers = Elsewhere()
        sending = asyncio.create_task(peers.deliver_to(links, THERE))
        while not peers.offers:
            await asyncio.sleep(0)
        peers.may_answer.set()
        assert await sending == ["comm"] * len(THERE)
        assert peers.offers == THERE[:1]
        reasons = {links.report()[peer]["why_not"]["shared"] for peer in THERE}
        assert reasons == {"another host"}
        links.cool_down()
        await peers.deliver_to(links, THERE)
        assert len(peers.offers) == 2

    with_links(test, security=ENCRYPTED)


def test_each_worker_of_the_own_host_is_asked():
    """Some of them may run in containers, others not."""

    async def test(links):
        peers = Elsewhere()
        peers.may_answer.set()
        await peers.deliver_to(links, HERE)
        assert sorted(peers.offers) == HERE

    with_links(test, security=ENCRYPTED)


def test_an_error_is_no_refusal_of_the_host():
    async def test(links):
        peers = Elsewhere()
        peers.may_answer.set()

        async def failing(data):
            raise RunIsOver

        with pytest.raises(RunIsOver):
            await links.deliver(THERE[0], "auto", compose, failing)
        await peers.deliver_to(links, THERE[1:])
        assert peers.offers == THERE[1:2]

    with_links(test, security=ENCRYPTED)


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
        engine = await invite_anybody(await UcxEngine.start("127.0.0.1"))
        try:
            await test(links, Deaf(engine, is_silent).call)
        finally:
            await links.ucx.close(HANG_S)
            await engine.close(HANG_S)

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
def test_ucx_link_is_renewed_once_and_then_given_up(monkeypatch):
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


# ------------------------------------------------------------------ before anything is sent


def test_a_worker_without_shared_memory_reports_it_as_missing(monkeypatch):
    def no_files():
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("dask_gpurt.plugins.shuffle.peer_links.SharedPages", no_files)
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
def test_device_codecs_are_used_where_both_peers_have_them(monkeypatch, theirs, both):
    with emulated(monkeypatch):
        assert asked_of(theirs) == (["codecs"], both)


def test_a_worker_without_device_codecs_does_not_ask_its_peer():
    assert asked_of([128]) == ([], set())


def test_unexpected_answer_of_a_peer_is_an_error(monkeypatch):
    with emulated(monkeypatch), pytest.raises(ProtocolError, match="codecs 7"):
        asked_of(7)


def test_worker_announces_its_device_codecs(monkeypatch):
    async def test(links):
        said.append((await links.accept({"codecs": None}))["ours"])

    said = []
    with_links(test)
    with emulated(monkeypatch):
        with_links(test)
    assert said == [[], [128, 129]]
