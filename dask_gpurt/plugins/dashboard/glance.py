"""A worker's part of the dashboard's page: a summary of bounded size, made when it is asked for.

`gathering` asks for it while a page is open, and `overview` merges the summaries of all workers.
Workers count shuffle messages anyway (`shuffle.traffic`). Everything else here is read on demand.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from distributed.metrics import time

from dask_gpurt.plugins import request_checks
from dask_gpurt.plugins.patches.p2p import event_loop
from dask_gpurt.shuffle.traffic import OTHERS, WINDOW_S, LinkPath, Traffic, summed

if TYPE_CHECKING:
    from distributed import Worker

    from dask_gpurt.plugins.memory.manager import ManagedMemory
    from dask_gpurt.plugins.worker.worker_runtime import WorkerRuntime

#: Path of inputs that tasks fetch from other workers over Dask's own connections.
INPUTS = "inputs"
#: Most runs of each kind, and most decisions on codecs, in a summary.
MAX_RUNS = 8
#: A run takes as many bytes as so many links. A summary with few links has fewer runs.
LINKS_OF_RUN = 8
MAX_DECISIONS = 8
#: Most transfers that one summary reads from Dask's log.
MAX_TRANSFERS = 5_000


class WorkerGlance:
    """The summaries of one worker. On the event loop."""

    def __init__(
        self,
        worker: Worker,
        runtime: WorkerRuntime,
        memory: ManagedMemory | None,
        unmanaged: str | None,
    ) -> None:
        self._worker, self._runtime, self._memory = worker, runtime, memory
        self._unmanaged = unmanaged
        self._fetched = Traffic()
        #: The last entry of Dask's log that `_fetched` has.
        self._last: Any = None

    async def gpurt_glance(self, most_links: int) -> dict[str, Any]:
        """Handler: return the summary, as plain values, with the busiest links."""
        most_links = request_checks.count("most_links", most_links)
        most_runs = min(MAX_RUNS, most_links // LINKS_OF_RUN)
        runtime = self._runtime
        return {
            "links": self._links(most_links),
            "levels": self._memory.store.report()["levels"] if self._memory is not None else [],
            "spilled_nbytes": self._memory.store.spilled_total[1]
            if self._memory is not None
            else 0,
            "unmanaged": self._unmanaged,
            "shards_nbytes": runtime.shards_nbytes(),
            "shards_on_disk_nbytes": runtime.shards_on_disk_nbytes(),
            "open_runs": runtime.reports_of_open_runs(most_runs),
            # The scheduler learns of an ended run with the next heartbeat.
            "ended_runs": runtime.run_reports.unsure()[-most_runs:],
            "codecs": self._codecs(),
        }

    def _links(self, most: int) -> list[tuple[str, str, str, int, int]]:
        """Return the busiest links: to peers for shuffles, from peers for inputs of tasks.

        Bytes of the others are summed by path, with `OTHERS` in place of the peer.
        """
        sent = self._runtime.links.traffic.lately(event_loop(self._worker).time())
        found = [*summed([*sent.items(), *self._fetched_lately().items()]).items()]
        others = summed((self._without_peer(link), moved) for link, moved in found[most:])
        return [(*link, *moved) for link, moved in [*found[:most], *others.items()]]

    def _without_peer(self, link: LinkPath) -> LinkPath:
        is_out = link.sender == self._worker.address
        return link._replace(receiver=OTHERS) if is_out else link._replace(sender=OTHERS)

    def _fetched_lately(self) -> dict[LinkPath, Any]:
        """Return what tasks of this worker fetched, from the log that every worker keeps."""
        now_s = time() + self._worker.scheduler_delay  # the log's clock
        new = takewhile(
            lambda entry: entry is not self._last and entry["stop"] > now_s - WINDOW_S,
            islice(reversed(self._worker.transfer_incoming_log), MAX_TRANSFERS),
        )
        for entry in reversed([*new]):
            link = LinkPath(entry["who"], self._worker.address, INPUTS)
            self._fetched.add(link, entry["total"], entry["stop"])
            self._last = entry
        return self._fetched.lately(now_s)

    def _codecs(self) -> dict[str, Any]:
        """Return the number of decisions by chosen codec, and the largest sections in full."""
        decisions = self._runtime.codec_decisions()
        largest = sorted(decisions, key=lambda one: -one.nbytes)[:MAX_DECISIONS]
        return {
            "choices": dict(Counter(one.choice for one in decisions)),
            "largest": [
                {
                    "section": one.section,
                    "link": one.link,
                    "choice": one.choice,
                    "nbytes": one.nbytes,
                    "bandwidth": one.bandwidth,
                    "ratio": next((t.ratio for t in one.trials if t.codec == one.codec), 1.0),
                    "reason": one.reason,
                }
                for one in largest
            ],
        }
