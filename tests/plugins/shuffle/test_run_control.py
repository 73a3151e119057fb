"""Tasks of one worker that need a new run of a shuffle ask for it once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.exceptions import Reschedule

from dask_gpurt.plugins.shuffle.run_control import RunControl


class SchedulerWithRun:
    """The answers of a scheduler that has run 1 of a shuffle, and may give it up."""

    def __init__(self, gives_up: bool) -> None:
        self.run_id, self.n_asked = 1, 0
        self._gives_up = gives_up

    async def shuffle_get(self, **asked: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"status": "OK", "run_spec": SimpleNamespace(run_id=self.run_id)}

    async def shuffle_barrier(self, *, run_id: int, consistent: bool, **asked: Any) -> None:
        await asyncio.sleep(0)
        self.n_asked += 1
        if run_id != self.run_id:
            raise ValueError("it does not match")
        self.run_id += self._gives_up and not consistent


async def asked_by_three(scheduler: SchedulerWithRun) -> list[BaseException]:
    worker: Any = SimpleNamespace(scheduler=scheduler, address="tcp://127.0.0.1:1")
    control = RunControl(worker, "shuffle", 1)
    errors = [ValueError(number) for number in range(3)]
    raised = await asyncio.gather(*map(control.start_over, errors), return_exceptions=True)
    assert all(isinstance(one, BaseException) for one in raised)
    return raised  # type: ignore[return-value]


@pytest.mark.parametrize("is_over", [False, True])
def test_tasks_run_again_once_the_run_is_over(is_over: bool) -> None:
    scheduler = SchedulerWithRun(gives_up=True)
    scheduler.run_id += is_over
    raised = asyncio.run(asked_by_three(scheduler))
    assert [type(one) for one in raised] == [Reschedule] * 3
    assert scheduler.n_asked == (0 if is_over else 1)


def test_each_task_fails_if_the_scheduler_keeps_the_run() -> None:
    scheduler = SchedulerWithRun(gives_up=False)
    raised = asyncio.run(asked_by_three(scheduler))
    assert [one.args for one in raised] == [(0,), (1,), (2,)]
    assert scheduler.n_asked == 1
