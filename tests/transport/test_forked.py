"""Tests that a forked child leaves UCX to its parent, however the child ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.limits import HANG_S

pytest.importorskip("ucxx", reason="the ucx extra is not installed")
pytestmark = pytest.mark.cluster


#: Two engines on a loop in another thread, and a transfer between them.
ENGINES = """
import asyncio, os, sys, threading
import numpy as np
from dask_gpurt.errors import TransportError
from dask_gpurt.transport.ucx.engine import UcxEngine

def move(number):
    async def both():
        await asyncio.gather(
            one.send(other.token, number, [source], 30),
            other.receive(one.token, number, [target], 30),
        )
    source, target = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    do(both())
    assert np.array_equal(source, target)

def do(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(120)

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
one, other = do(UcxEngine.start("127.0.0.1")), do(UcxEngine.start("127.0.0.1"))
do(one.connect(do(other.invite(one.token, 30)), 30))
move(0)
"""

CHILDREN = """
import ctypes, gc, multiprocessing, subprocess

def exits():
    sys.exit(3)

def fails():
    raise RuntimeError("a mistake of the child's")

def exits_natively():
    ctypes.CDLL(None).exit(3)

def drops_everything():
    global one, other
    del one, other
    gc.collect()
    sys.exit(3)

def wants_an_engine():
    async def refused():
        # What was there before does not wait for threads that are not there.
        await one.close(30)
        for wanted in (UcxEngine.start("127.0.0.1"), one.connect(other.descriptor, 30)):
            try:
                await wanted
            except TransportError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("not refused")
    asyncio.run(refused())
    sys.exit(3)

def forks_again():
    child = os.fork()
    if not child:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    sys.exit(3)

def in_a_thread():
    def run():
        if not os.fork():
            sys.exit(3)
        os.wait()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

for number, child in enumerate(
    (exits, fails, exits_natively, drops_everything, wants_an_engine, forks_again), 1
):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        child()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == (1 if child is fails else 3), (child, status)
    move(number)
in_a_thread()
move(100)
process = multiprocessing.get_context("fork").Process(target=exits)
process.start()
process.join()
assert process.exitcode == 3
move(101)
subprocess.run(["true"], preexec_fn=lambda: None, check=True)
move(102)
do(one.close(30)), do(other.close(30))
do(do(UcxEngine.start("127.0.0.1")).close(30))
print("done")
"""

IN_A_COROUTINE = """
import asyncio, os, sys
from dask_gpurt.transport.ucx.engine import UcxEngine

async def main():
    engine = await UcxEngine.start("127.0.0.1")
    pid = os.fork()
    if not pid:
        sys.exit(3)  # this closes the loop
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    await asyncio.to_thread(int)
    await engine.close(30)
    await (await UcxEngine.start("127.0.0.1")).close(30)
    print("done")

asyncio.run(main())
"""


@pytest.mark.parametrize("program", [ENGINES + CHILDREN, IN_A_COROUTINE])
def test_a_forked_child_does_not_harm_its_parent(program):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "done\n"
