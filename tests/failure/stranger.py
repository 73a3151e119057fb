"""A program in which strangers connect to every port of workers that shuffle over UCX.

::

    python -m tests.failure.stranger --seconds 300

A stranger knows the ports, but no key. It connects with UCX and sends large messages. It also opens
sockets that stay silent, or sends noise, byte by byte or all at once.

Workers grow by about 0.05 MiB with each shuffle, and by more with stock Dask, because they log and
profile themselves. So a second cluster runs as many shuffles without strangers, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import time
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
from distributed import Client, LocalCluster

import dask_gpurt

#: Most memory by which strangers may make a worker grow.
MOST_NBYTES = 64 << 20

#: Connections of one burst of messages to each port.
BURST_ROUNDS = 20


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on."""
    connections = psutil.Process(pid).net_connections("tcp")
    return sorted({one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN})


def noise(ports: list[int], stop: Any) -> None:
    """Open sockets that stay silent, send noise slowly, or send noise at once."""
    silent: list[socket.socket] = []
    while not stop.is_set():
        for port in ports:
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", port), 0.2)
                one.settimeout(0.2)
                silent.append(one)
                one.send(os.urandom(1))
            with contextlib.suppress(OSError):
                with socket.create_connection(("127.0.0.1", port), 0.2) as one:
                    one.settimeout(0.2)
                    one.sendall(os.urandom(1 << 20))
        for one in silent[:-64]:
            one.close()
        silent = silent[-64:]


def ucx_burst(ports: list[int]) -> None:
    """Send messages of 16 MiB over new UCX endpoints, without a greeting; UCX copies them."""
    from dask_gpurt.transport.ucx import context

    os.environ["UCX_RNDV_THRESH"] = "inf"
    ucx = context.load({"TLS": "tcp,self"})
    array = ucx.array(np.ones(16 << 20, dtype=np.uint8))
    kept: list[Any] = []
    for port in ports * BURST_ROUNDS:
        with contextlib.suppress(Exception):
            endpoint = ucx.endpoint_to("127.0.0.1", port)
            tag = ucx.library.UCXXTag(int.from_bytes(os.urandom(4), "little") << 32)
            kept.append((endpoint, endpoint.tag_send(array, tag)))
        for _ in range(1000):
            ucx.worker.progress_once()
        for endpoint, _ in kept[:-8]:
            with contextlib.suppress(Exception):
                endpoint.close()
        kept = kept[-8:]
    os._exit(0)


def ucx_messages(ports: list[int], stop: Any) -> None:
    """Send bursts from new processes, because one process would soon run out of files."""
    while not stop.is_set():
        burst = multiprocessing.get_context("spawn").Process(target=ucx_burst, args=(ports,))
        burst.start()
        burst.join(10)
        burst.kill()


#: All kinds of stranger.
KINDS = [noise, ucx_messages]


@contextlib.contextmanager
def strangers(ports: list[int], kinds: list[Any]) -> Any:
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes = [context.Process(target=kind, args=(ports, stop)) for kind in kinds]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(10)
            process.kill()


def shuffled(client: Client, number: int) -> int:
    """Shuffle, and return the number of correct rows."""
    numbers = np.random.default_rng(number).integers(0, 1000, 200_000)
    frame = pd.DataFrame({"key": numbers, "x": np.arange(200_000)})
    found = client.compute(dd.from_pandas(frame, npartitions=8).shuffle("key")).result()
    pd.testing.assert_frame_equal(found.sort_values("x").reset_index(drop=True), frame)
    return len(found)


def grown(kinds: list[Any], seconds: float = 0, at_least: int = 2) -> dict[str, Any]:
    """Shuffle with these kinds of strangers; return ports, memory and number of shuffles."""
    settings = {
        "gpurt.enabled": True,
        "gpurt.shuffle.transport": "ucx",
        "dataframe.shuffle.method": "p2p",
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="2 GiB", dashboard_address=":0"
        ) as cluster,
        Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())

        def rss() -> list[int]:
            return [psutil.Process(pid).memory_info().rss for pid in pids]

        for number in range(4):
            shuffled(client, number)
        before = rss()
        ports = [port for pid in pids for port in ports_of(pid)]
        most, n_shuffles = before, 0
        with strangers(ports, kinds):
            end = time.monotonic() + seconds
            while time.monotonic() < end or n_shuffles < at_least:
                shuffled(client, n_shuffles)
                most = [max(pair) for pair in zip(most, rss(), strict=True)]
                n_shuffles += 1
        status = dask_gpurt.status(client)
        links = [one["links"].values() for one in status["workers"].values()]
        return {
            "ports": ports,
            "before_mib": [one >> 20 for one in before],
            "most_mib": [one >> 20 for one in most],
            "grew_mib": max(b - a for a, b in zip(before, most, strict=True)) >> 20,
            "shuffles": n_shuffles,
            "runs": status["runs"],
            "paths": sorted({link["path"] for some in links for link in some}),
        }


def report(seconds: float) -> dict[str, Any]:
    """Shuffle with strangers, then as often without; return both, and the strangers' cost."""
    beside = grown(KINDS, seconds)
    alone = grown([], at_least=beside["shuffles"])
    return {**beside, "alone": alone, "cost_mib": beside["grew_mib"] - alone["grew_mib"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300)
    found = report(parser.parse_args().seconds)
    print(json.dumps(found))
    return int(found["cost_mib"] << 20 > MOST_NBYTES)


if __name__ == "__main__":
    raise SystemExit(main())
