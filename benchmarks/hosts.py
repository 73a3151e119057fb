"""Several hosts imitated on one machine by network namespaces, and a cluster across them.

A bridge joins the namespaces. A token bucket of `tc` limits each link to a rate. So a message
between two workers takes as long as on a real network of that rate. This needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from distributed import Client, Scheduler
from distributed.deploy.spec import SpecCluster

BRIDGE = "gpurt0"
NETWORK = "10.79.0"


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def hosts(n: int) -> Iterator[list[str]]:
    """Make network namespaces with one address each, on a bridge that this process can reach."""
    if os.geteuid():
        sys.exit("network namespaces need root")
    names = [f"gpurt-h{number}" for number in range(1, n + 1)]
    if os.path.exists(f"/sys/class/net/{BRIDGE}"):
        leftover = "; ".join(["ip link del " + BRIDGE, *(f"ip netns del {one}" for one in names)])
        # We do not remove it ourselves: another run may be using it.
        sys.exit(
            f"the network {BRIDGE} exists already: another run is using it, or was killed and left"
            f" it behind; if no run is active, remove it with `{leftover}`"
        )
    with contextlib.ExitStack() as stack:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(run, "ip", "link", "del", BRIDGE)
        run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names, 1):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run(*f"ip link add gpurt-v{number} type veth peer name eth0 netns {name}".split())
            # A process that is about to end may keep the namespace, and with it the other end.
            stack.callback(run, "ip", "link", "del", f"gpurt-v{number}")
            run("ip", "link", "set", f"gpurt-v{number}", "master", BRIDGE, "up")
            run(*f"ip -n {name} addr add {NETWORK}.{number}/24 dev eth0".split())
            run(*f"ip -n {name} link set eth0 up".split())
            run(*f"ip -n {name} link set lo up".split())
        yield names


def shape(names: list[str], rate: str | None, only: str | None = None) -> None:
    """Limit the link of every host, or of one, to a rate in both directions; None: no limit."""
    bucket = f"root tbf rate {rate} burst 256kb latency 100ms"
    for number, name in enumerate(names, 1):
        if only is not None and name != only:
            continue
        for where, device in ((["-n", name], "eth0"), ([], f"gpurt-v{number}")):
            if rate is None:
                with contextlib.suppress(subprocess.CalledProcessError):
                    run("tc", *where, "qdisc", "del", "dev", device, "root")
            else:
                run("tc", *where, "qdisc", "replace", "dev", device, *bucket.split())


@contextlib.contextmanager
def cluster(
    names: list[str], workers_each: int = 1, addresses: list[str] | None = None
) -> Iterator[Client]:
    """Start a scheduler here, and `workers_each` workers of one thread on each host.

    Workers listen at the addresses of their hosts; by default those on the bridge.
    """
    addresses = addresses or [f"{NETWORK}.{number}" for number in range(1, len(names) + 1)]
    scheduler = {"cls": Scheduler, "options": {"host": f"{NETWORK}.254", "dashboard": False}}
    with SpecCluster(workers={}, scheduler=scheduler, silence_logs=50) as made:
        address = made.scheduler_address
        processes = []
        try:
            for name, host in zip(names, addresses, strict=True):
                options = f"--host {host} --nthreads 1 --no-nanny --no-dashboard"
                worker = f"{sys.executable} -m dask worker {address} {options} &"
                # Processes of a host see each other, and none of another host: they share memory
                # as they would on real hosts.
                alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
                command = ["ip", "netns", "exec", name, *alone, workers_each * worker + " wait"]
                processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            with Client(made, set_as_default=False) as client:
                client.wait_for_workers(len(names) * workers_each, timeout=60)
                yield client
        finally:
            for process in processes:
                process.kill()  # `unshare` ignores other signals, and takes its workers along
            for process in processes:
                process.wait()
