"""Machines of a cluster, on its scheduler: described, reported by workers, and measured.

The scheduler asks workers for their machines if placement uses a description, and on request. It
probes links if placement uses measured rates. Reports complete the file that a person wrote, which
wins where it speaks. All answers are validated. `placement` makes the decisions; `is_described`
says whether it may rely on the topology.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from distributed.metrics import time

from dask_gpurt.config import DISCOVERED, TopologySettings
from dask_gpurt.errors import ProtocolError
from dask_gpurt.plugins.ask_workers import ask
from dask_gpurt.plugins.shielding import DEADLINE_S
from dask_gpurt.topology import probing
from dask_gpurt.topology.description import parse
from dask_gpurt.topology.discovery import discover
from dask_gpurt.topology.host_draft import WorkerReport
from dask_gpurt.topology.learned import End
from dask_gpurt.topology.machine import MachineReport
from dask_gpurt.topology.model import Topology
from dask_gpurt.topology.probing import Measured

if TYPE_CHECKING:
    from distributed import Scheduler

    from dask_gpurt.plugins.placement.placer import Placement

logger = logging.getLogger("dask_gpurt")

#: Deadline for a worker's report on its machine. The worker may have to start NVML first.
_REPORT_DEADLINE_S = 10.0
_NO_ANSWER = "no answer in {:g} s"
#: Deadline for a worker's measurement. The worker itself stops earlier.
_PROBE_DEADLINE_S = 4 * probing.MAX_PAIR_S
#: Weight of a measurement, in ordinary transfers.
_WEIGHT = 4
#: Pause before asking again whether tasks still run. Dask offers no event for their end.
_RETRY_S = 1.0
_TASKS_BEGAN = "tasks began to run"
#: Most problems of workers that are kept.
_MAX_PROBLEMS = 16


def _is_at_exit(error: Exception) -> bool:
    """Return whether the script has ended: its interpreter starts no more threads.

    From Python 3.13 on, executors close while the main thread still counts as alive.
    """
    return not threading.main_thread().is_alive() or "interpreter shutdown" in str(error)


class Machines:
    """The machines of one scheduler's workers.

    Parameters
    ----------
    ready
        Workers that can be asked. The owner keeps the collection up to date.
    """

    def __init__(self, scheduler: Scheduler, ready: Collection[str]) -> None:
        self._scheduler = scheduler
        self._ready = ready
        self._reports: dict[str, MachineReport] = {}
        self._problems: dict[str, str] = {}
        self._measured: dict[tuple[End, End], Measured] = {}
        self._tried: set[tuple[str, str]] = set()
        self._state, self._reason = "not run", ""
        self._spent_s = 0.0
        self._probing: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_ending = False
        self._learner: Placement | None = None
        self._discovering: asyncio.Task[None] | None = None
        #: Set if workers change while machines are being discovered.
        self._is_outdated = False
        self._settings = TopologySettings(None, None, "off")
        #: What the file describes, and the same completed by reports. None without a description.
        self._given: Topology | None = None
        self.topology: Topology | None = None
        self._configuring = asyncio.Lock()

    async def configure(self, settings: TopologySettings) -> None:
        """Apply new settings.

        Raises
        ------
        ConfigError
            The description of the machines is invalid. Nothing has changed.
        """
        # Serialise concurrent clients: the last one's settings apply, and apply completely.
        async with self._configuring:
            # Most clients bring the settings that are there already.
            if (settings.file, settings.text) != (self._settings.file, self._settings.text):
                # Parsing hundreds of hosts takes half a second.
                given = await asyncio.to_thread(_described, settings)
                self._given = self.topology = given
            self._settings = settings

    @property
    def is_described(self) -> bool:
        """Whether the machines are described, or will be, so that placement may rely on the links.

        Workers report what their links can carry. Dask's connections get only a part of that, and
        less for GPU data that passes through host memory. So placement takes the figures of a
        person as they are, and scales reported ones to the transfers that workers measure.
        """
        return self.topology is not None or self.is_discovered

    @property
    def is_discovered(self) -> bool:
        """Whether all of the description comes from reports, by `gpurt.topology.file: auto`."""
        return self._settings.file == DISCOVERED

    # ------------------------------------------------------------------ discovery

    def _discover_if_wanted(self) -> None:
        if not self.is_described or self._learner is None:
            return
        self._is_outdated = True
        if self._discovering is None or self._discovering.done():
            self._discovering = asyncio.create_task(self._discover())

    async def _discover(self) -> None:
        """Describe the machines from workers' reports, until no worker has joined meanwhile."""
        while self._is_outdated:
            self._is_outdated = False
            settings = self._settings
            try:
                await self._fetch_reports()
                # For hundreds of hosts this takes seconds.
                found = await asyncio.to_thread(discover, self._seen(), self._rates(), self._given)
            except Exception as error:
                if _is_at_exit(error):
                    return
                # The links are learnt then, as without a description.
                self._record_problem("discovery", repr(error)[:200])
                logger.error(
                    "the machines could not be described; bandwidths are learned from transfers",
                    exc_info=error,
                )
                return
            if settings != self._settings:
                # Another client named another file meanwhile.
                self._is_outdated = self.is_described and self._learner is not None
            elif self._learner is not None and found.topology != self.topology:
                self.topology = found.topology
                self._learner.set_topology(found.topology)

    # ------------------------------------------------------------------ probing

    def set_learner(self, placement: Placement | None) -> None:
        """Set the placement that receives measured rates from now on, and replay earlier ones."""
        self._learner = placement
        for pair, found in self._measured.items():
            self._feed_learner(*pair, found)

    def workers_changed(self) -> None:
        """Discover machines, and probe links, if wanted.

        Called when all present workers have reported.
        """
        self._discover_if_wanted()
        self._start_probing()

    def _start_probing(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe_if_wanted())

    def _try_again(self) -> None:
        """Probe once no task runs."""
        if self._is_busy():
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._try_again)
        else:
            self._start_probing()

    async def _probe_if_wanted(self) -> None:
        if self._discovering is not None:
            # The reports say which speeds are missing.
            await asyncio.wait([self._discovering])
        # More workers may join during the probe.
        while probing.pairs(self._endpoints(), self._tried):
            why_not = probing.why_not(
                self._settings.probe,
                n_hosts=len({end.host for end in self._endpoints()}),
                # Reported links are scaled to what is measured, and some have no known speed.
                is_described=self._learner is not None and self._learner.are_links_written(),
                is_needed=self._is_speed_missing(),
                is_used=self._learner is not None,
                is_busy=self._is_busy(),
            )
            if why_not is not None:
                if not self._measured:
                    self._state, self._reason = "not run", why_not
                if why_not == probing.BUSY:
                    self._try_again()
                return
            try:
                await self._probe(lambda: _TASKS_BEGAN if self._is_busy() else None)
            except Exception as error:
                # The probe is optional, so its failure only goes to the log and the status.
                self._state, self._reason = "failed", repr(error)
                logger.error("the probe of links failed", exc_info=error)
            self._discover_if_wanted()
            if self._state != "done" and self._reason != _TASKS_BEGAN:
                return

    def _is_speed_missing(self) -> bool:
        """Return whether a link is missing that no person described and no worker could report."""
        return (
            self.is_described
            and self._learner is not None
            and not self._learner.are_links_described()
        )

    def _undescribed(self) -> list[str]:
        """Return the workers on no described machine, if placement uses a description."""
        if self._learner is None or not self.is_described:
            return []
        return self._learner.undescribed()

    def _is_busy(self) -> bool:
        return any(ws.processing for ws in self._scheduler.workers.values())

    def _endpoints(self) -> list[End]:
        workers = self._scheduler.workers
        return [End(one, workers[one].host) for one in sorted(self._ready) if one in workers]

    async def _probe(self, why_stop: Callable[[], str | None]) -> None:
        """Measure the pairs that were not measured yet, one at a time."""
        self._state, self._reason = "running", ""
        began = time() - self._spent_s
        for source, target in probing.pairs(self._endpoints(), self._tried):
            reason = "the runtime is switched off" if self._is_ending else why_stop()
            if reason is None and time() - began > probing.MAX_S:
                reason = f"it took {probing.MAX_S:g} s"
            if reason is not None:
                self._state, self._reason = "stopped", reason
                break
            self._tried.add((source.host, target.host))
            about = f"{source.address} to {target.address}"
            try:
                found = probing.conclude(await self._measure(source, target))
            except (ProtocolError, OSError) as error:
                self._record_problem(about, str(error) or repr(error))
            else:
                self._problems.pop(about, None)
                self._measured[source, target] = found
                self._feed_learner(source, target, found)
            self._spent_s = time() - began
        else:
            self._state = "done"

    async def _measure(self, source: End, target: End) -> Any:
        answers = await ask(
            self._scheduler,
            "gpurt_probe",
            [target.address],
            _PROBE_DEADLINE_S,
            source=source.address,
        )
        if answers.silent:
            raise TimeoutError(_NO_ANSWER.format(_PROBE_DEADLINE_S))
        answer = answers.received[target.address]
        if isinstance(answer, Exception):
            raise OSError(repr(answer)[:200]) from answer
        if isinstance(answer, dict) and "problem" in answer:
            raise ProtocolError(str(answer["problem"])[:200])
        return answer

    def _feed_learner(self, source: End, target: End, found: Measured) -> None:
        if self._learner is not None:
            rates = {source.address: (found.nbytes_per_s * _WEIGHT, _WEIGHT)}
            self._learner.observe(target.address, rates)

    # ------------------------------------------------------------------ asked for

    async def describe(self, probe: bool) -> dict[str, Any]:
        """Return the machines as the file and workers describe them, as an editable description.

        Parameters
        ----------
        probe
            Whether to measure the links first, regardless of settings and running tasks.

        Returns
        -------
        dict
            `text`, the `file` that it completes or None, the number of `workers` that reported,
            and `problems` by worker or pair.
        """
        await self._fetch_reports()
        if probe:
            # Another client may have started a probe meanwhile.
            while self._probing is not None and not self._probing.done():
                await asyncio.wait([self._probing], timeout=DEADLINE_S)
            self._tried.clear()
            self._measured.clear()
            self._spent_s = 0.0
            self._probing = asyncio.create_task(self._probe(lambda: None))
            await self._probing
            self._discover_if_wanted()
        seen, measured, given = self._seen(), self._rates(), self._given
        file = None if given is None else self._settings.file
        # For hundreds of hosts this takes seconds.
        text = await asyncio.to_thread(lambda: discover(seen, measured, given).as_text())
        silent = "not included: it has not reported yet, or the runtime is off there"
        unseen = sorted(self._scheduler.workers.keys() - self._reports.keys())
        left_out = dict.fromkeys(unseen, silent)
        problems = {**left_out, **self._problems}
        return {"text": text, "file": file, "workers": len(seen), "problems": problems}

    def _seen(self) -> list[WorkerReport]:
        workers = self._scheduler.workers
        return [
            WorkerReport(address, workers[address].name, workers[address].host, report)
            for address, report in self._reports.items()
            if address in workers
        ]

    def _rates(self) -> dict[tuple[str, str], Measured]:
        return {
            (source.host, target.host): found for (source, target), found in self._measured.items()
        }

    async def _fetch_reports(self) -> None:
        missing = sorted(set(self._ready) - self._reports.keys())
        if not missing:
            return
        answers = await ask(self._scheduler, "gpurt_machine", missing, _REPORT_DEADLINE_S)
        # Of a worker that left meanwhile, nothing would ever be removed.
        for address in {*answers.silent}.intersection(self._ready):
            self._record_problem(address, _NO_ANSWER.format(_REPORT_DEADLINE_S))
        for address, answer in answers.received.items():
            if address not in self._ready:
                continue
            try:
                self._reports[address] = MachineReport.from_plain(answer)
            except ProtocolError as error:
                self._record_problem(address, f"its report cannot be used: {error}")
            else:
                self._problems.pop(address, None)

    def _record_problem(self, about: str, problem: str) -> None:
        if len(self._problems) < _MAX_PROBLEMS:
            self._problems[about] = problem

    def remove_worker(self, address: str) -> None:
        """Forget a worker that left.

        Measurements of its host stay while the host has other workers.
        """
        self._reports.pop(address, None)
        for about in [one for one in self._problems if address in one.split(" to ")]:
            del self._problems[about]
        if not self._tried:
            return
        hosts = {ws.host for ws in self._scheduler.workers.values()}
        self._tried = {pair for pair in self._tried if hosts.issuperset(pair)}
        self._measured = {
            (source, target): found
            for (source, target), found in self._measured.items()
            if source.host in hosts and target.host in hosts
        }

    def summary(self) -> dict[str, Any]:
        """Return the known links and the state of the probe, for `status`."""
        rates = [found.nbytes_per_s for found in self._measured.values()]
        hosts = () if self.topology is None else self.topology.hosts
        return {
            "file": self._settings.file if self.is_described else None,
            "undescribed": self._undescribed(),
            "reported_hosts": sum(host.is_reported for host in hosts),
            "is_speed_missing": self._is_speed_missing(),
            "hosts": len({ws.host for ws in self._scheduler.workers.values()}),
            "probe": {
                "state": self._state,
                "reason": self._reason,
                "pairs": len(rates),
                "slowest_nbytes_per_s": min(rates, default=None),
                "fastest_nbytes_per_s": max(rates, default=None),
                "seconds": self._spent_s,
                "problems": dict(self._problems),
            },
        }

    async def end(self) -> None:
        """Stop measuring, and wait for the pair that is measured now.

        Otherwise one of the two would ask the other for bytes after that has dropped its handlers.
        """
        self._is_ending = True
        if self._discovering is not None:
            self._discovering.cancel()
        if self._probing is not None:
            await asyncio.wait({self._probing}, timeout=2 * probing.MAX_PAIR_S)
        await self.close()

    async def close(self) -> None:
        """Stop measuring at once."""
        if self._retry is not None:
            self._retry.cancel()
        tasks = [task for task in (self._probing, self._discovering) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DEADLINE_S)


def _described(settings: TopologySettings) -> Topology | None:
    if settings.text is None:
        return None
    return parse(settings.text, settings.file or "topology")
