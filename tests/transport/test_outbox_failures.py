"""A failed send reaches producers and flush; nothing is lost silently."""

from __future__ import annotations

import asyncio

import pytest

from dask_gpurt.errors import ExchangeError
from dask_gpurt.transport.sending.send_budget import SendBudget
from tests.transport.outbox_post import Item, Post, Refused, run, settle

# ------------------------------------------------------------------ failure


def test_failure_is_raised_by_put_and_flush_from_then_on():
    async def scenario():
        post = Post()
        post.refusals["a"] = Refused("a is gone")
        post.open("a", "b")
        await post.put("a", Item(1))
        for _ in range(2):
            with pytest.raises(Refused, match="a is gone"):
                await post.outbox.flush()
        with pytest.raises(Refused, match="a is gone"):
            await post.put("b", Item(2))
        await settle()
        assert post.started["b"] == []

    run(scenario)


def test_a_failure_ends_a_waiting_flush():
    async def scenario():
        post = Post()
        await post.put("a", Item(1))
        await post.put("b", Item(2))
        flushing = asyncio.create_task(post.outbox.flush())
        await post.until_started("b", 1)
        post.refusals["b"] = Refused("b is gone")
        post.open("b")
        # The other peer never answers.
        with pytest.raises(Refused, match="b is gone"):
            await flushing
        await post.outbox.close()

    run(scenario)


def test_the_first_failure_is_raised():
    async def scenario():
        post = Post()
        post.refusals |= {"a": Refused("a is gone"), "b": Refused("b is gone")}
        await post.put("a", Item(1))
        await post.put("b", Item(2))
        await post.until_started("a", 1)
        await post.until_started("b", 1)
        post.open("b")
        await settle()
        post.open("a")
        await settle()
        with pytest.raises(Refused, match="b is gone"):
            await post.outbox.flush()

    run(scenario)


def test_a_failure_stops_all_sending():
    async def scenario():
        post = Post(message_nbytes=10)
        post.refusals["b"] = Refused("b is gone")
        post.open("b")
        await post.put("a", Item(1), Item(2))
        await post.until_started("a", 1)
        await post.put("b", Item(3))
        with pytest.raises(Refused):
            await post.outbox.flush()
        post.open("a")
        await settle()
        assert post.started["a"] == [[1]]

    run(scenario)


def test_cancelled_send_is_a_failure():
    """A cancelled message was not delivered."""

    async def scenario():
        post = Post()
        post.refusals["a"] = asyncio.CancelledError("the connection was shut")
        post.open("a")
        await post.put("a", Item(1))
        with pytest.raises(ExchangeError):
            await post.outbox.flush()
        with pytest.raises(ExchangeError):
            await post.put("a", Item(2))

    run(scenario)


def test_a_cancelled_send_unblocks_producers():
    async def scenario():
        post = Post(limit_nbytes=10)
        await post.put("a", Item(1))
        held_back = await post.hold_back("a", Item(2))
        post.refusals["a"] = asyncio.CancelledError()
        post.open("a")
        with pytest.raises(ExchangeError):
            await held_back

    run(scenario)


def test_failed_outbox_gives_back_what_it_queued():
    """Other runs share the budget; the failed run may be closed much later."""

    async def scenario():
        budget = SendBudget(100)
        post = Post(budget=budget, message_nbytes=10)
        post.refusals["a"] = Refused("a is gone")
        await post.put("a", Item(1), Item(2), Item(3))
        await post.put("b", Item(4))
        await post.until_started("a", 1)
        await post.until_started("b", 1)
        post.open("a")
        with pytest.raises(Refused):
            await post.outbox.flush()
        await settle()
        assert budget.used_nbytes == post.outbox.waiting_nbytes == 10, "only b's is in flight"
        post.open("b")
        await settle()
        assert budget.used_nbytes == post.outbox.waiting_nbytes == 0
        await post.outbox.close()
        assert budget.used_nbytes == 0

    run(scenario)


def test_put_returns_if_a_failed_outbox_is_closed():
    """A task of a run that is over must run again, not fail."""

    async def scenario():
        post = Post()
        post.refusals["a"] = Refused("a is gone")
        post.open("a")
        await post.put("a", Item(1))
        with pytest.raises(Refused):
            await post.outbox.flush()
        await post.outbox.close()
        await post.put("a", Item(2))
        assert post.outbox.waiting_nbytes == 0

    run(scenario)
