"""A program for the other end of UCX links, which runs a test's commands.

A command is a JSON object on one line, with a number. So is its answer. Commands run concurrently.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable

import numpy as np

from dask_gpurt.transport.ucx.engine import UcxEngine

PATIENCE_S = 60.0


def content(number: int, sizes: list[int]) -> list[np.ndarray]:
    """Return bytes of a message that both ends can compute."""
    return [
        (np.arange(size, dtype=np.uint32) * 7 + number + place).astype(np.uint8)
        for place, size in enumerate(sizes)
    ]


async def invite_anybody(engine: UcxEngine) -> UcxEngine:
    """Make an engine admit any peer that knows its key, for the duration of a test."""
    await engine.invite("0" * 32, 600)
    return engine


async def exchange(engine: UcxEngine, token: str, what: str, number: int, sizes: list[int]):
    """Send a message, or receive one and check its content."""
    if what == "send":
        await engine.send(token, number, content(number, sizes), PATIENCE_S)
        return
    buffers = [np.zeros(size, dtype=np.uint8) for size in sizes]
    await engine.receive(token, number, buffers, PATIENCE_S)
    for place, (found, expected) in enumerate(zip(buffers, content(number, sizes), strict=True)):
        assert np.array_equal(found, expected), f"buffer {place} of message {number}"


async def obey(engine: UcxEngine, command: dict) -> object:
    match command["do"]:
        case "connect":
            return await engine.connect(command["descriptor"], PATIENCE_S)
        case "report":
            return engine.report()
        case "close":
            return await engine.close(PATIENCE_S)
        case what:
            return await exchange(
                engine, command["peer"], what, command["number"], command["sizes"]
            )


async def answer(engine: UcxEngine, command: dict, obey: Callable) -> None:
    try:
        reply = {"result": await obey(engine, command)}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": command["id"], **reply}), flush=True)


async def main(obey: Callable = obey) -> None:
    engine = await UcxEngine.start("127.0.0.1", json.loads(sys.argv[1]))
    await invite_anybody(engine)
    print(json.dumps(engine.descriptor), flush=True)
    tasks = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        task = asyncio.create_task(answer(engine, json.loads(line), obey))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await engine.close(PATIENCE_S)


if __name__ == "__main__":
    asyncio.run(main())
