"""A short look at a running cluster, from outside and without changing it.

For `dask gpurt doctor` and `dask gpurt status`: connects with the flag off, so that asking does not
switch anything on, and gives up soon, in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config

import dask_gpurt
from dask_gpurt.command.observe import quiet_preloads, scheduler_address
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import Client

CONNECT_TIMEOUT_S = 5.0
#: How long an answer may take once connected: workers that are busy answer late.
ANSWER_TIMEOUT_S = 20.0
#: How long workers may take to say what is installed there, of that.
VERSIONS_TIMEOUT_S = 5.0


class ConnectError(GpurtError, ValueError):
    """No scheduler was named, or there is none where it should be.

    Parameters
    ----------
    problem
        What is wrong.
    remedy
        What to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem, self.remedy = problem, remedy


#: The advice for a failure of which nothing more is known.
_CHECK = "check the address, and that the scheduler runs and can be reached from here"
#: Dask's protocol begins with the size of a message, and the first one is much smaller than this.
_MAX_FIRST_NBYTES = 2**32


def address_of(scheduler: str | None, scheduler_file: Path | None) -> str | None:
    """Address that the options name, if they name one.

    Raises
    ------
    ConnectError
        They name two, or the file does not hold one.
    """
    if scheduler_file is None:
        return scheduler
    if scheduler is not None:
        raise ConnectError("give --scheduler or --scheduler-file, not both")
    try:
        return str(json.loads(scheduler_file.read_text(encoding="utf-8"))["address"])
    except OSError as error:
        raise ConnectError(f"cannot read {scheduler_file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConnectError(f"{scheduler_file} is not a scheduler file") from error


@contextlib.contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client that is closed afterwards.

    Raises
    ------
    ConnectError
        No scheduler answers there.
    """
    from distributed import Client

    quiet_preloads()
    settings = {
        "gpurt.enabled": False,
        # Once connected, a scheduler that says no more must not hold us up either.
        "distributed.comm.timeouts.connect": f"{CONNECT_TIMEOUT_S}s",
    }
    # What else is to be said about a failure, distributed logs with a traceback.
    with dask.config.set(settings), silent("distributed", "tornado", "asyncio"):
        try:
            # distributed tries again and again where nobody listens, until its time is up.
            _touch(address)
            # First without a client: one that never connected cannot be closed in silence.
            asyncio.run(_knock(address))
            client = Client(  # type: ignore[no-untyped-call]
                address, timeout=CONNECT_TIMEOUT_S, set_as_default=False
            )
        except ConnectError:
            raise
        except Exception as error:
            problem = f"no scheduler answers at {address}: {_brief(error)}"
            raise ConnectError(problem, _CHECK) from error
        try:
            yield client
        finally:
            with contextlib.suppress(Exception):
                client.close(timeout=CONNECT_TIMEOUT_S)  # type: ignore[no-untyped-call]


def _touch(address: str) -> None:
    """Find out soon who listens there, if it is an address with a port.

    Raises
    ------
    ConnectError
        Nobody does, or it is no program of Dask.
    """
    from distributed.comm import get_address_host_port, parse_address

    scheme, _ = parse_address(address)
    if scheme not in ("tcp", "tls"):
        return

    def failure(why: str, remedy: str) -> ConnectError:
        return ConnectError(f"no scheduler answers at {address}: {why}", remedy)

    host, port = get_address_host_port(address)
    seconds = f"{CONNECT_TIMEOUT_S:g} s"
    try:
        connection = socket.create_connection((host, port), CONNECT_TIMEOUT_S)
    except ConnectionRefusedError:
        remedy = "start the scheduler, or correct the address"
        raise failure("nothing listens on that port", remedy) from None
    except socket.gaierror:
        raise failure(f"there is no host {host!r}", "correct the name of the host") from None
    except TimeoutError:
        raise failure(f"no connection in {seconds}", _CHECK) from None
    with connection:
        if scheme == "tls":
            return  # a server of TLS waits for its client to begin
        try:
            first = connection.recv(8)
        except TimeoutError:
            remedy = "check the port, and whether the scheduler is held up or wants tls://"
            raise failure(f"it says nothing for {seconds}", remedy) from None
        except ConnectionResetError:
            first = b""
    if int.from_bytes(first.ljust(8, b"\xff"), "little") > _MAX_FIRST_NBYTES:
        raise failure("another program listens on that port", "correct the port")


async def _knock(address: str) -> None:
    from distributed.core import rpc

    scheduler = rpc(address, timeout=CONNECT_TIMEOUT_S)  # type: ignore[no-untyped-call]
    async with asyncio.timeout(CONNECT_TIMEOUT_S), scheduler:
        kind = (await scheduler.identity())["type"]
    if kind != "Scheduler":
        problem = f"no scheduler answers at {address}: that is a {kind}"
        raise ConnectError(problem, "give the address of the scheduler")


def ask(client: Client, *, versions: bool = False) -> dict[str, Any]:
    """Status of a cluster.

    Parameters
    ----------
    versions
        Whether to add what is installed: `client`, `scheduler`, and `workers` by address, without
        those that were silent before; None if another one is now.

    Raises
    ------
    ConnectError
        It does not answer in time.
    """

    address = scheduler_address(client)

    async def both() -> dict[str, Any]:
        status = await dask_gpurt.status(client)
        if versions:
            status["versions"] = await _versions(client, status)
        return dict(status)

    try:
        status = client.sync(  # type: ignore[no-untyped-call]
            both, callback_timeout=ANSWER_TIMEOUT_S
        )
    except Exception as error:
        problem = f"the scheduler at {address} does not answer: {_brief(error)}"
        raise ConnectError(problem, _CHECK) from error
    return {"scheduler": address, **status}


async def _versions(client: Client, status: dict[str, Any]) -> dict[str, Any]:
    """As `Client.get_versions`, which waits for workers that never answer."""
    from distributed.versions import get_versions

    scheduler: Any = client.scheduler
    silent = status.get("silent")
    # Where the runtime is off, who is silent is not known: all of them are asked.
    workers = sorted(status["workers"].keys() - silent) if silent else None
    found = {"client": get_versions(), "scheduler": await scheduler.versions(packages=[])}
    asked = asyncio.ensure_future(
        scheduler.broadcast(
            msg={"op": "versions", "packages": []}, workers=workers, on_error="ignore"
        )
    )
    # Not `asyncio.timeout`: what is cancelled as it connects may go on, and wait for ever.
    await asyncio.wait({asked}, timeout=VERSIONS_TIMEOUT_S)
    found["workers"] = None if asked.cancel() else await asked
    return found


def _brief(error: BaseException) -> str:
    """The first line of what went wrong in the end, or what it is called."""
    if isinstance(error, TimeoutError):
        return "it took too long"
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, (TimeoutError, asyncio.CancelledError)) or "Timed out" in str(root):
        return "it took too long"
    if isinstance(root, OSError) and root.strerror:
        return root.strerror
    return next(iter(str(root).strip().splitlines()), "") or type(root).__name__


@contextlib.contextmanager
def silent(*names: str) -> Iterator[None]:
    """Keep loggers from saying anything for a while."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
