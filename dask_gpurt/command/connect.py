"""Read-only connections to a running cluster, for `dask gpurt doctor` and `dask gpurt status`.

They connect with the flag off, so that a query does not switch anything on. On failure they give up
soon, with a one-line error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask.config

import dask_gpurt
from dask_gpurt.command.observe import quiet_preloads, scheduler_address
from dask_gpurt.errors import GpurtError

if TYPE_CHECKING:
    from distributed import Client

CONNECT_TIMEOUT_S = 5.0
#: Longest wait for an answer after connecting. Busy workers answer late.
ANSWER_TIMEOUT_S = 20.0
#: Part of that wait in which workers may report their installed versions.
VERSIONS_TIMEOUT_S = 5.0


class ConnectError(GpurtError, ValueError):
    """No scheduler was named, or none answers at the address.

    Parameters
    ----------
    problem
        The problem.
    remedy
        What the user can do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem, self.remedy = problem, remedy


#: Advice for a failure with an unknown cause.
_CHECK = "check the address, and that the scheduler runs and can be reached from here"
#: Advice for a failure of TLS.
_CHECK_KEYS = "check the keys: --tls-ca-file, --tls-cert, --tls-key, or distributed.comm.tls"
#: Dask's protocol begins with the size of a message. The first message is much smaller than this.
_MAX_FIRST_NBYTES = 2**32


def address_of(scheduler: str | None, scheduler_file: Path | None) -> str | None:
    """Return the address that the options name, or None.

    Raises
    ------
    ConnectError
        The options name two addresses, or the file has none.
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


def required_address(scheduler: str | None, scheduler_file: Path | None) -> str:
    """Return the address that the options name.

    Raises
    ------
    ConnectError
        The options name none or two addresses, or the file has none.
    """
    address = address_of(scheduler, scheduler_file)
    if address is None:
        raise ConnectError("no cluster is named; give --scheduler or --scheduler-file")
    return address


def tls_keys(
    ca_file: Path | None, cert: Path | None, key: Path | None
) -> AbstractContextManager[object]:
    """Use these files for TLS in a `with` block. Dask's settings say those that are None."""
    given = {"ca-file": ca_file, "client.cert": cert, "client.key": key}
    settings = {f"distributed.comm.tls.{name}": str(path) for name, path in given.items() if path}
    return dask.config.set(settings)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Client]:
    """Connect a client, and close it at the end of the `with` block.

    Raises
    ------
    ConnectError
        No scheduler answers there.
    """
    from distributed import Client

    quiet_preloads()
    settings = {
        "gpurt.enabled": False,
        # Also bounds the connections that a stuck scheduler never answers after the first one.
        "distributed.comm.timeouts.connect": f"{CONNECT_TIMEOUT_S}s",
    }
    # distributed logs more about a failure, with a traceback.
    with dask.config.set(settings), silent("distributed", "tornado", "asyncio"):
        try:
            # distributed retries until its timeout if nothing listens.
            _check_port(address)
            # First without a client: a client that never connected logs errors at its close.
            asyncio.run(_check_scheduler(address))
            client = Client(  # type: ignore[no-untyped-call]
                address, timeout=CONNECT_TIMEOUT_S, set_as_default=False
            )
        except ConnectError:
            raise
        except Exception as error:
            problem = f"no scheduler answers at {address}: {_one_line(error)}"
            raise ConnectError(problem, _CHECK) from error
        try:
            yield client
        finally:
            with contextlib.suppress(Exception):
                client.close(timeout=CONNECT_TIMEOUT_S)  # type: ignore[no-untyped-call]


def _check_port(address: str) -> None:
    """Check quickly that something listens at an address with a port.

    Raises
    ------
    ConnectError
        It has no port, nothing listens there, or it is not a Dask program.
    """
    from distributed.comm import get_address_host_port, parse_address

    scheme, _ = parse_address(address)
    if scheme not in ("tcp", "tls"):
        return

    def failure(why: str, remedy: str) -> ConnectError:
        return ConnectError(f"no scheduler answers at {address}: {why}", remedy)

    try:
        host, port = get_address_host_port(address)
    except ValueError:
        problem = f"{address} is not an address with a port"
        raise ConnectError(problem, "write it like tcp://10.0.0.1:8786") from None
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
        try:
            if scheme == "tls":
                connection = _tls_context(address).wrap_socket(connection, server_hostname=host)
            first = connection.recv(8)
        except TimeoutError:
            remedy = "check the port, and whether the scheduler is stuck or requires tls://"
            raise failure(f"it sends nothing for {seconds}", remedy) from None
        except ssl.SSLError as error:
            raise failure(_one_line(error), _CHECK_KEYS) from error
        except ConnectionResetError:
            first = b""
    if int.from_bytes(first.ljust(8, b"\xff"), "little") > _MAX_FIRST_NBYTES:
        raise failure("another program listens on that port", "correct the port")


def _tls_context(address: str) -> ssl.SSLContext:
    """Return the context for connections to an address, with the keys of Dask's settings.

    Raises
    ------
    ConnectError
        There are no keys, or their files cannot be read.
    """
    from distributed.security import Security

    names = [f"distributed.comm.tls.{name}" for name in ("ca-file", "client.cert", "client.key")]
    if None in map(dask.config.get, names):
        raise ConnectError(
            f"the scheduler at {address} requires keys",
            "give --tls-ca-file, --tls-cert and --tls-key, or set distributed.comm.tls",
        )
    try:
        arguments = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    except OSError as error:  # SSLError is one, too
        raise ConnectError(f"the keys cannot be read: {_one_line(error)}", _CHECK_KEYS) from error
    context: ssl.SSLContext = arguments["ssl_context"]
    return context


async def _check_scheduler(address: str) -> None:
    from distributed.core import rpc
    from distributed.security import Security

    arguments = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    scheduler = rpc(  # type: ignore[no-untyped-call]
        address, timeout=CONNECT_TIMEOUT_S, connection_args=arguments
    )
    async with asyncio.timeout(CONNECT_TIMEOUT_S), scheduler:
        kind = (await scheduler.identity())["type"]
    if kind != "Scheduler":
        problem = f"no scheduler answers at {address}: that is a {kind}"
        raise ConnectError(problem, "give the address of the scheduler")


def ask(client: Client, *, versions: bool = False) -> dict[str, Any]:
    """Return the status of a cluster.

    Parameters
    ----------
    versions
        Whether to add installed versions: `client`, `scheduler`, and `workers` by address. Workers
        that did not answer before are omitted. `workers` is None if another worker does not answer
        now.

    Raises
    ------
    ConnectError
        The scheduler does not answer in time.
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
        raise no_answer(address, error) from error
    return {"scheduler": address, **status}


def no_answer(address: str, error: Exception) -> ConnectError:
    """Return the error of a command whose connected scheduler did not answer."""
    problem = f"the scheduler at {address} does not answer: {_one_line(error)}"
    return ConnectError(problem, _CHECK)


async def _versions(client: Client, status: dict[str, Any]) -> dict[str, Any]:
    """Return versions like `Client.get_versions`, which would wait forever for a stuck worker."""
    from distributed.versions import get_versions

    from dask_gpurt.plugins.bootstrap import PACKAGE

    scheduler: Any = client.scheduler
    silent = status.get("silent")
    # If the runtime is off, it is unknown which workers are stuck. Ask all of them.
    workers = sorted(status["workers"].keys() - silent) if silent else None
    theirs = await scheduler.versions(packages=[PACKAGE])
    found = {"client": get_versions(packages=[PACKAGE]), "scheduler": theirs}
    message = {"op": "versions", "packages": [PACKAGE]}
    found["workers"] = await ask_workers(client, message, workers, VERSIONS_TIMEOUT_S)
    return found


async def ask_workers(
    client: Client, message: dict[str, Any], workers: list[str] | None, timeout_s: float
) -> dict[str, Any] | None:
    """Return the answers of workers to a message; None if one of them does not answer in time.

    Parameters
    ----------
    workers
        Addresses; None for all workers.
    """
    scheduler: Any = client.scheduler
    asked = asyncio.ensure_future(
        scheduler.broadcast(msg=message, workers=workers, on_error="ignore")
    )
    # Not `asyncio.timeout`: a call cancelled while it connects may continue, and wait forever.
    await asyncio.wait({asked}, timeout=timeout_s)
    return None if asked.cancel() else await asked


def _one_line(error: BaseException) -> str:
    """Return the first line of the root cause, or its type."""
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
    """Silence loggers in a `with` block."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
