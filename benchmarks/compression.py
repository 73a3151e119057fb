"""Compression on a slow link: TPC-H lineitem shuffled between two hosts, `none` against `auto`.

The hosts are two network namespaces joined by a bridge, and their links are shaped to a rate with
tc's token bucket, so that what passes between the two workers takes the time it would take on such
a network. Needs root, `ip` and `tc`. The same cluster runs everything: `gpurt.shuffle.compression`
is changed between runs, which take turns.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dask
import dask.dataframe as dd
from distributed import Client, Scheduler, wait
from distributed.deploy.spec import SpecCluster

import dask_gpurt
from benchmarks.harness import Timing, arguments, persisting_s, write_json
from dask_gpurt.demo.tpch_data import make_tpch

BRIDGE = "gpurt0"
NETWORK = "10.79.0"


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def hosts(n: int) -> Iterator[list[str]]:
    """Network namespaces with an address each, on one bridge that this process is on, too."""
    names = [f"gpurt-h{number}" for number in range(1, n + 1)]
    with contextlib.ExitStack() as stack:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(run, "ip", "link", "del", BRIDGE)
        run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names, 1):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run(*f"ip link add gpurt-v{number} type veth peer name eth0 netns {name}".split())
            run("ip", "link", "set", f"gpurt-v{number}", "master", BRIDGE, "up")
            run(*f"ip -n {name} addr add {NETWORK}.{number}/24 dev eth0".split())
            run(*f"ip -n {name} link set eth0 up".split())
            run(*f"ip -n {name} link set lo up".split())
        yield names


def shape(names: list[str], rate: str | None) -> None:
    """Give every host's link a rate in both directions; None for as fast as it goes."""
    bucket = f"root tbf rate {rate} burst 256kb latency 100ms"
    for number, name in enumerate(names, 1):
        for where, device in ((["-n", name], "eth0"), ([], f"gpurt-v{number}")):
            if rate is None:
                with contextlib.suppress(subprocess.CalledProcessError):
                    run("tc", *where, "qdisc", "del", "dev", device, "root")
            else:
                run("tc", *where, "qdisc", "replace", "dev", device, *bucket.split())


@contextlib.contextmanager
def cluster(names: list[str]) -> Iterator[Client]:
    """A scheduler here, and a worker of one thread in each host."""
    scheduler = {"cls": Scheduler, "options": {"host": f"{NETWORK}.254", "dashboard": False}}
    with SpecCluster(workers={}, scheduler=scheduler, silence_logs=50) as made:
        address = made.scheduler_address
        processes = []
        try:
            for number, name in enumerate(names, 1):
                options = f"--host {NETWORK}.{number} --nthreads 1 --no-nanny --no-dashboard"
                command = [sys.executable, "-m", "dask", "worker", address, *options.split()]
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *command], stderr=subprocess.DEVNULL
                    )
                )
            with Client(made, set_as_default=False) as client:
                client.wait_for_workers(len(names), timeout=60)
                yield client
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def compare(client: Client, name: str, inputs: Any, repeats: int, target: float | None) -> Timing:
    """`none` in the place of stock, `auto` in that of the runtime."""
    timing = Timing(name, 0, target=target)

    def once(compression: str) -> float:
        settings = {
            "gpurt.shuffle.compression": compression,
            # The namespaces are of one machine, where memory would be shared instead.
            "gpurt.shuffle.transport": "comm",
            "dataframe.shuffle.method": "p2p",
        }
        with dask.config.set(settings), client.as_current():
            dask_gpurt.enable(client)
            return persisting_s(client, inputs.shuffle("l_partkey"))

    order = [("none", timing.stock_s), ("auto", timing.enabled_s)]
    for compression, _ in order:
        once(compression)
    for number in range(repeats):
        for compression, seconds in order:
            seconds.append(once(compression))
        order.reverse()
        print(f"  {name}: {number + 1}/{repeats}", file=sys.stderr, flush=True)
    none, auto = statistics.median(timing.stock_s), statistics.median(timing.enabled_s)
    wanted = f" (at least {target:g})" if target else ""
    print(f"{name:24} none {none:7.3f} s  auto {auto:7.3f} s  ratio {none / auto:5.2f}{wanted}")
    last = dask_gpurt.status(client)["shuffles"][-2:]
    for shuffle in last:
        share = shuffle["wire_nbytes"] / max(shuffle["sent_nbytes"], 1)
        print(f"  sent {shuffle['sent_nbytes']:,} B, on the wire {share:.0%}")
    return timing


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if os.geteuid():
        sys.exit("network namespaces need root")
    tables = make_tpch(0.5 * options.scale)
    timings = []
    with hosts(2) as names, cluster(names) as client:
        with client.as_current():
            lineitem = dd.read_parquet(tables / "lineitem")
            lineitem = client.persist(lineitem)
            wait(lineitem)
        for name, rate, target in [("100 MB/s", "800mbit", 1.8), ("unshaped", None, 0.97)]:
            if options.only and options.only not in name:
                continue
            shape(names, rate)
            timings.append(compare(client, name, lineitem, options.repeats, target))
    write_json(options.json, timings, sides={"stock_s": "none", "enabled_s": "auto"})


if __name__ == "__main__":
    main()
