"""Whether the report of a trace names the one slow link among several, and its rate.

Three hosts are network namespaces. Each pair has a cable of its own, so one direction of one cable
can be shaped alone. A shuffle is traced, and the report must name that link first. It needs root,
`ip` and `tc`.

    python -m benchmarks.traced_links
    DASK_GPURT__SHUFFLE__COMPRESSION=none python -m benchmarks.traced_links --mebibytes 1200

Few cores do not fill a fast link: they encode, copy and read between messages. The rate is then
lower than that of the cable.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import combinations
from pathlib import Path

import dask
import dask.dataframe as dd
from distributed import Client, wait

import dask_gpurt
from benchmarks import hosts
from benchmarks.harness import settle, write_json
from benchmarks.shuffle import numbers_part
from dask_gpurt.tracing import files
from dask_gpurt.tracing.report.trace_report import report_of

N_HOSTS, N_PARTS = 3, 24
#: Network of the cables between hosts. The network of `benchmarks.hosts` leads to the scheduler.
NETWORK = "10.79.1"
#: Host that sends over the slow link, and host that receives.
SLOW = 1, 3
ROW_NBYTES = 32
#: Share of a frame that is payload: a frame has 1,514 bytes, of which headers take 66. `tc` counts
#: frames.
PAYLOAD_SHARE = 1448 / 1514


def cable(names: list[str], rate: str) -> None:
    """Join each pair of hosts by a cable, and shape one direction of one of them."""
    for number, name in enumerate(names, 1):
        hosts.run(*f"ip -n {name} addr add {NETWORK}.{number}/32 dev lo".split())
        # Other controls of congestion probe the rate now and then, and leave a part of it free.
        control = "net.ipv4.tcp_congestion_control=reno"
        hosts.run(*f"ip netns exec {name} sysctl -q -w {control}".split())
        hosts.run(*f"ip route replace {NETWORK}.{number}/32 via {hosts.NETWORK}.{number}".split())
    for one, other in combinations(range(1, len(names) + 1), 2):
        ends = (one, other), (other, one)
        (a, b) = (f"to{there}" for _, there in ends)
        here, there = names[one - 1], names[other - 1]
        hosts.run(*f"ip -n {here} link add {a} type veth peer name {b} netns {there}".split())
        for at, to in ends:
            name = names[at - 1]
            hosts.run(*f"ip -n {name} link set to{to} up".split())
            source = f"{NETWORK}.{at}"
            hosts.run(*f"ip -n {name} route add {NETWORK}.{to}/32 dev to{to} src {source}".split())
    bucket = f"root tbf rate {rate} burst 256kb latency 100ms"
    sender, receiver = SLOW
    hosts.run("tc", "-n", names[sender - 1], *f"qdisc add dev to{receiver} {bucket}".split())


def traced(client: Client, nbytes: int, path: Path) -> None:
    """Shuffle so many bytes, and write a trace of that."""
    rows = nbytes // N_PARTS // ROW_NBYTES
    lazy = dd.from_map(numbers_part, range(N_PARTS), rows=rows, meta=numbers_part(0, 1).iloc[:0])
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        inputs = client.persist(lazy)
        wait(inputs)
        wait(client.persist(inputs.shuffle("key")))  # links are opened
        settle(client)
        with dask_gpurt.trace(client, path):
            wait(client.persist(inputs.shuffle("x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").replace("\n", " "))
    parser.add_argument("--rate", type=int, default=50, help="MB/s of the slow link")
    parser.add_argument("--mebibytes", type=int, default=900, help="bytes of the shuffle")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(N_HOSTS) as names:
        cable(names, f"{8 * options.rate}mbit")
        path = Path(folder) / "links.json.gz"
        addresses = [f"{NETWORK}.{number}" for number in range(1, N_HOSTS + 1)]
        with hosts.cluster(names, addresses=addresses) as client:
            dask_gpurt.enable(client)
            traced(client, options.mebibytes << 20, path)
        report = report_of(files.read(path))
    links = sorted(report.findings.links.values(), key=lambda row: -row.busy_s)
    for row in links:
        print(f"{row.link:30} {row.rate / 1e6:7.1f} MB/s, busy {row.busy_s:.2f} s")
    first = links[0]
    wanted = f"{NETWORK}.{SLOW[0]} to {NETWORK}.{SLOW[1]}"
    rate = first.rate / (1e6 * options.rate * PAYLOAD_SHARE)
    print(f"first: {first.link} ({wanted} wanted); its rate to that of the cable: {rate:.3f}")
    print("\n".join(f"{one.rule}: {one.evidence}" for one in report.bottlenecks))
    write_json(options.json, [], links={"first": first.link, "wanted": wanted, "rate": rate})


if __name__ == "__main__":
    main()
