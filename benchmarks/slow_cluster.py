"""A cluster of three hosts, of which one has a slow link, for `benchmarks.slow_program`.

The hosts are network namespaces of this machine, with a worker of one thread each. It needs root,
`ip` and `tc`, and runs until Ctrl-C.

    python -m benchmarks.slow_cluster
    python -m benchmarks.slow_cluster --without-slow-link
"""

from __future__ import annotations

import argparse
import contextlib
import signal

from benchmarks import hosts

N_HOSTS = 3
#: Rate of the link of the last host.
SLOW_RATE = "100mbit"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without-slow-link", action="store_true")
    options = parser.parse_args()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    with hosts.hosts(N_HOSTS) as names:
        if not options.without_slow_link:
            hosts.shape(names, SLOW_RATE, only=names[-1])
        with hosts.cluster(names) as client:
            address = client.scheduler_info(n_workers=0)["address"]
            print(f"Connect to {address}; Ctrl-C ends the cluster.", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


if __name__ == "__main__":
    main()
