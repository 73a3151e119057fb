"""A run ends for its worker, whatever goes wrong while it is closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dask_gpurt.plugins.shuffle.exchange_run import ExchangeRun
from dask_gpurt.transport.sending.send_budget import SendBudget


class ClosedPart:
    """A part of a run that is closed, and may fail at it."""

    def __init__(self, error=None):
        self.error, self.n_closed = error, 0

    def close(self):
        self.n_closed += 1
        if self.error is not None:
            raise self.error


def test_run_ends_though_its_files_cannot_be_freed():
    async def drop_queues():
        pass

    async def scenario():
        run, memory, ended = object.__new__(ExchangeRun), ClosedPart(), []
        vars(run).update(
            id="shuffle",
            run_id=1,
            closed=False,
            _ended=asyncio.Event(),
            _closed_event=asyncio.Event(),
            _outbox=SimpleNamespace(close=drop_queues),
            _send_budget=SendBudget(1),
            _last_report={},
            _store=ClosedPart(OSError("no such disk")),
            _memory=memory,
            _runtime=SimpleNamespace(end_run=lambda run, report: ended.append(run)),
        )
        with pytest.raises(OSError, match="no such disk"):
            await run.close()
        assert memory.n_closed == 1
        assert ended == [run]
        await asyncio.wait_for(run.close(), 120)

    asyncio.run(scenario())
