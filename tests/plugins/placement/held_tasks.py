"""Tasks that wait in the middle until a test goes on. Their workers are in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

from distributed import Client, Scheduler
from distributed.utils_test import async_poll_for


class HeldTasks:
    """The inputs that tasks have taken, and whether the tasks may end.

    Attributes
    ----------
    taken
        Inputs that the tasks of a test took, in that order. The tasks add to it.
    """

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._started, self._may_end = Event(), Event()

    def during_a_test(self) -> Iterator[None]:
        """Begin anew, and let all tasks end after the test, for a fixture."""
        self._started.clear()
        self._may_end.clear()
        self.taken.clear()
        yield
        self.go_on()

    def wait(self) -> None:
        """Wait in a task until the test goes on."""
        self._started.set()
        assert self._may_end.wait(60)

    def go_on(self) -> None:
        self._may_end.set()

    async def started(self, client: Client) -> None:
        """Wait in a test until a task waits."""
        await client.loop.asyncio_loop.run_in_executor(None, self._started.wait, 60)


async def until_all_is_stocks(client: Client, scheduler: Scheduler) -> None:
    """Wait for the end of all tasks that graphs keep after the runtime, and then of its hook."""
    await async_poll_for(lambda: not scheduler.tasks, 60)
    assert scheduler.stream_handlers["update-graph"] != scheduler.update_graph
    await client.submit(int)
    await async_poll_for(
        lambda: scheduler.stream_handlers["update-graph"] == scheduler.update_graph, 60
    )
