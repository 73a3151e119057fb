"""The client's side of the runtime: switch it on and off, and query it.

These functions work on any running cluster. Importing this module loads distributed; `dask_gpurt`
imports this module only when one of its functions is called.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import distributed
from distributed.protocol.pickle import dumps

import dask_gpurt
from dask_gpurt import config, metrics
from dask_gpurt.errors import ActivationError, ConfigError, ProtocolError, StrictFallbackError
from dask_gpurt.plugins import bootstrap, client_origin, request_checks
from dask_gpurt.plugins.bootstrap import NAME
from dask_gpurt.plugins.dashboard.status_html import RuntimeStatus
from dask_gpurt.plugins.memory import cupy_messages
from dask_gpurt.plugins.patches import client as client_patches
from dask_gpurt.plugins.patches import p2p
from dask_gpurt.plugins.patches.graphs import foreign_shuffles
from dask_gpurt.plugins.time_spent import spent
from dask_gpurt.topology import description

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger("dask_gpurt")

#: Why the runtime could not be switched on for a client, as its log says.
_refusals: WeakKeyDictionary[Client, str] = WeakKeyDictionary()


def scheduler_of(client: Client) -> Any:
    """Return the scheduler's RPC, whose attributes are its handlers as coroutine functions.

    Raises
    ------
    ActivationError
        The client is not connected.
    """
    if client.scheduler is None:
        raise ActivationError("this client is not connected to a scheduler")
    return client.scheduler


def _check_client(client: Any) -> None:
    """Raise `TypeError` for anything but a client. Users often pass its cluster."""
    if not isinstance(client, distributed.Client):
        given = type(client).__name__
        raise TypeError(f"give a distributed.Client, such as Client(cluster), not a {given}")


def _sync(client: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a coroutine function on the client's event loop.

    Raises
    ------
    TypeError
        `client` is not a Client; it may be its cluster.
    """
    _check_client(client)
    # Raise for a closed client here: its event loop may be closed too.
    if not client.asynchronous:
        scheduler_of(client)
    return client.sync(function, client, *args)


async def activate(client: Client, settings: config.Settings) -> None:
    """Register the runtime on the cluster of a client.

    Raises
    ------
    ActivationError
        The scheduler cannot run the runtime. The message says where, and the remedy.
    ConfigError
        The description of the machines is invalid. The message names the line.
    """
    if reason := p2p.unsupported_reason():
        raise ActivationError(f"{reason}; stock Dask runs")
    cupy_messages.register()
    if settings.topology.text is not None:
        text, name = settings.topology.text, settings.topology.file or "topology"
        await asyncio.to_thread(description.parse, text, name)
    problem = await scheduler_differs(client)
    status = await read_status(client, ask_workers=False)
    if problem is not None:
        rest = "Settings are unchanged" if status["active"] else "Stock Dask runs"
        raise ActivationError(f"{problem}. {rest}.")
    if not status["active"]:
        if status.get("unusable"):
            raise ActivationError(f"{status['unusable']}; stock Dask runs")
        await _register(client, settings)
    # Another client may have activated the runtime first, with other settings.
    problem = await scheduler_of(client).gpurt_configure(
        settings=settings.to_plain(), version=dask_gpurt.__version__
    )
    if problem is not None:
        raise ActivationError(f"{problem}. Settings are unchanged.")
    foreign_shuffles.hold(client)


async def _register(client: Client, settings: config.Settings) -> None:
    from dask_gpurt.plugins.scheduler.gpurt_scheduler import GpurtScheduler

    plugin = GpurtScheduler(settings, dask_gpurt.__version__)
    try:
        await scheduler_of(client).register_scheduler_plugin(
            plugin=dumps(plugin), name=NAME, idempotent=True
        )
    except ImportError as error:
        reason = cannot_import(scheduler_of(client), error)
        raise ActivationError(f"{reason}. Stock Dask runs.") from error
    except ActivationError as error:
        raise ActivationError(f"{error}. Stock Dask runs.") from None
    status = await read_status(client, ask_workers=False)
    if not status["active"]:
        raise ActivationError(f"{status['reason']}; stock Dask runs")


def cannot_import(scheduler: Any, error: ImportError) -> str:
    """Return why a scheduler that has this package cannot use it, and the remedy."""
    return (
        f"the scheduler at {scheduler.address}: {bootstrap.PACKAGE} cannot be imported there"
        f" ({error}); run `pip install {bootstrap.PACKAGE}=={dask_gpurt.__version__}` there"
    )


async def on_connect(client: Client) -> None:
    """Activate the runtime when a client with the flag connects. The preload calls this.

    A client made by a task leaves the cluster's settings unchanged: only the program's client sets
    them. Dask logs and drops any error of a preload. With `gpurt.strict`, the error is therefore
    raised again at the first computation.

    Raises
    ------
    ConfigError
        A setting, or the file that describes the machines, is invalid.
    """
    try:
        if (worker := await client_origin.creating_worker(client)) is not None:
            logger.info("a client of a task on worker %s does not change the settings", worker)
            return
        settings = config.read()
        _activate_on_reconnect(client, settings)
        await activate(client, settings)
    except (ActivationError, ConfigError) as error:
        _refusals[client] = str(error)
        _refuse_if_strict(client, error)
        if isinstance(error, ConfigError):
            # The preload logs it, once for a client and a scheduler in one process.
            raise
        logger.error("dask_gpurt is not active: %s", error)
    except Exception as error:
        _refuse_if_strict(client, error)
        raise


def _refuse_if_strict(client: Client, error: Exception) -> None:
    if config.is_strict():
        why = re.sub(r"[;.] stock Dask runs\.?$", "", str(error), flags=re.IGNORECASE)
        text = f"{why}. gpurt.strict forbids to go on with stock Dask."
        p2p.refuse_work(client, StrictFallbackError(text))


def _activate_on_reconnect(client: Client, settings: config.Settings) -> None:
    """Activate the runtime again if a client finds its scheduler started anew."""

    async def activate_if_new() -> None:
        try:
            status = await read_status(client, ask_workers=False)
            # Where the runtime was on, another client may have switched it off.
            if status["activation"] is None:
                await activate(client, settings)
        except (ActivationError, ConfigError) as error:
            _refuse_if_strict(client, error)
            logger.error("dask_gpurt is not active: %s", error)
        except Exception as error:
            logger.warning(
                "dask_gpurt cannot tell whether it is active after a reconnect: %r", error
            )

    client_patches.call_on_reconnect(client, activate_if_new)


def enable(client: Client) -> Any:
    return _sync(client, _enable, config.read())


async def _enable(client: Client, settings: config.Settings) -> None:
    p2p.allow_work(client)
    await activate(client, settings)
    _activate_on_reconnect(client, settings)


#: Called before this process switches the runtime off, with the scheduler's address and its status.
#: Counts begin anew when the runtime is switched on again.
told_at_disable: set[Callable[[str, dict[str, Any]], None]] = set()


async def _disable(client: Client) -> None:
    p2p.allow_work(client)
    client_patches.forget_reconnects(client)
    foreign_shuffles.release(client)
    scheduler = scheduler_of(client)
    status = await read_status(client, ask_workers=bool(told_at_disable))
    if status["active"]:
        for tell in tuple(told_at_disable):
            tell(scheduler.address, status)
        await scheduler.gpurt_disable()


def disable(client: Client) -> Any:
    return _sync(client, _disable)


async def scheduler_differs(client: Client) -> str | None:
    """Return how the scheduler's versions differ and the remedy; None if they match.

    Pickles work only between equal versions of Python, Dask and dask_gpurt. Otherwise only plain
    values may be sent.
    """
    scheduler = scheduler_of(client)
    found = await scheduler.versions(packages=[bootstrap.PACKAGE])
    differs = bootstrap.difference(found["packages"], bootstrap.installed())
    return None if differs is None else f"the scheduler at {scheduler.address}: {differs}"


async def _scheduler_status(client: Client, ask_workers: bool) -> dict[str, Any] | None:
    """Return the status that our scheduler plugin reports; None if there never was a plugin."""
    # A call of a missing handler would log a traceback on the scheduler. Any scheduler answers
    # `events`, in plain values; our last event says whether the handlers exist.
    scheduler = scheduler_of(client)
    events = await scheduler.events(topic=bootstrap.EVENTS)
    if not events or events[-1][1] != {"answers": True}:
        return None
    status: dict[str, Any] | None = await scheduler.gpurt_status(reports=ask_workers)
    return status


async def read_status(client: Client, *, ask_workers: bool) -> dict[str, Any]:
    """Return the status of a cluster; without asking workers, as of their last heartbeats."""
    status = await _scheduler_status(client, ask_workers)
    if status is None:
        status = {
            "active": False,
            "activation": None,
            "reason": _refusals.get(client, "not switched on for this cluster"),
            "runs": {"gpurt": 0, "stock": 0},
            "fallbacks": [],
            "placement": None,
            "collectives": None,
            "topology": None,
            "departed": {"workers": 0, "totals": metrics.total([])},
            "totals": metrics.total([]),
            "spent": spent(),
            "shuffles": [],
            "workers": dict.fromkeys(await scheduler_of(client).ncores()),
            "ready": [],
            "not_ready": {},
            "silent": [],
            "rest_s": 0.0,
        }
    # Messages have tuples in place of lists.
    status["shuffles"] = [
        {**one, "fullest": [*one["fullest"]], "hot": [*one["hot"]]} for one in status["shuffles"]
    ]
    status["totals"]["shuffles_gpurt"] = status["runs"]["gpurt"]
    status["totals"]["shuffles_stock"] = status["runs"]["stock"]
    return RuntimeStatus(status)


async def _full_status(client: Client) -> dict[str, Any]:
    return await read_status(client, ask_workers=True)


def status(client: Client) -> Any:
    return _sync(client, _full_status)


async def overview(client: Client) -> dict[str, Any]:
    """Return the data of the dashboard's page; `active` and `reason` alone if the runtime is off.

    It costs much less than `status`: workers answer with summaries, and at most once a second.
    """
    status = await read_status(client, ask_workers=False)
    if not status["active"]:
        return {"active": False, "reason": status["reason"]}
    found: dict[str, Any] = await scheduler_of(client).gpurt_overview()
    return found


async def machines(client: Client, probe: bool) -> dict[str, Any]:
    """Return the machines of a cluster as text that a user can edit.

    Parameters
    ----------
    probe
        Whether to measure the links between them first.

    Returns
    -------
    dict
        `text`, the `file` in use or None, the number of `workers` that reported, and `problems` by
        worker or pair.

    Raises
    ------
    ActivationError
        The runtime is off on that cluster, so workers cannot be asked.
    """
    status = await read_status(client, ask_workers=False)
    if not status["active"]:
        raise ActivationError(f"dask_gpurt is off on that cluster: {status['reason']}")
    found: dict[str, Any] = await scheduler_of(client).gpurt_topology(probe=probe)
    return found


async def _explain(client: Client, key: Any) -> dict[str, Any]:
    status = await read_status(client, ask_workers=False)
    if not status["active"]:
        return {"known": False, "key": str(key), "reason": str(status["reason"])}
    answer = await scheduler_of(client).gpurt_explain(key=key)
    if isinstance(answer, dict):
        return answer
    # Another client has switched the runtime off meanwhile, and with it this handler.
    return {"known": False, "key": str(key), "reason": "the runtime was switched off"}


def explain(client: Client, key: Any) -> Any:
    # A future, or a Delayed that was persisted.
    name = getattr(key, "key", key)
    try:
        request_checks.key(name)
    except ProtocolError as error:
        raise TypeError(
            "explain() takes the key of a task or a future, and got a value of type "
            f"{type(key).__name__}; futures_of(collection) returns futures of a persisted one"
        ) from error
    return _sync(client, _explain, name)


class ClientBlock:
    """A context manager for a block of a program, for `with` or `async with` as the client needs.

    Parameters
    ----------
    call
        The call that made it, for messages.

    Raises
    ------
    TypeError
        `client` is not a Client; it may be its cluster.
    """

    def __init__(self, client: Client, call: str) -> None:
        _check_client(client)
        self._client, self._call = client, call

    def __repr__(self) -> str:
        return f"<use it around a block: {self._usage}>"

    @property
    def _usage(self) -> str:
        return f"`{'async ' * bool(self._client.asynchronous)}with {self._call}:`"

    def _check_kind(self, *, is_async: bool) -> None:
        """Raise `TypeError` if the client needs the other kind of `with`."""
        if bool(self._client.asynchronous) != is_async:
            negated = "not " * is_async
            raise TypeError(f"this client is {negated}asynchronous; write {self._usage}")
