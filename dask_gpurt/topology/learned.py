"""Bandwidths of links, learnt from the transfers that Dask's workers report. Pure.

Every worker reports to the scheduler at what rate it received data from each peer. These rates are
of whole transfers: they include serialisation and busy processes at both ends. Placement needs
exactly that, but the rates scatter. So an estimate is a mean of logarithms, and a report far from
many earlier ones moves it by a bounded step.

There are estimates for pairs of workers, for pairs of hosts, and for the two kinds of pairs (same
host, different hosts). Each is the prior of the one before while that one has few reports. So rates
seen on some links are assumed for the others until these are seen.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from dask_gpurt.topology.model import LOCAL, Path

#: Rates before any report. Same host: what two processes reach through Dask's own connections.
#: Different hosts: what stock Dask assumes.
SAME_HOST_NBYTES_PER_S = 400e6
OTHER_HOST_NBYTES_PER_S = 100e6
#: Latency of a request and its answer over Dask's own connections.
LATENCY_S = 0.001

#: Weight of the prior in reports, and the largest weight of all past reports.
_PRIOR_WEIGHT = 0.5
_MAX_WEIGHT = 20.0
#: From this weight on, a report moves a rate at most by this factor times the report's weight.
_SETTLED = 3.0
_STEP = math.log(4)
#: Standard deviation of the logarithm of one report.
_SCATTER = 1.0
_NO_IDEA = 1e3
#: Rates beyond these are errors.
_SLOWEST, _FASTEST = 1e3, 1e13
_KINDS = {True: "same host", False: "network"}
#: Most pairs that are kept: at 1,000 workers, a sixteenth of all pairs.
MAX_PAIRS = 65_536


class End(NamedTuple):
    """A worker: its address, and the host in the address."""

    address: str
    host: str


class _Mean:
    """Mean of the logarithms of reported rates, in which older reports weigh less and less."""

    __slots__ = ("log_rate", "weight")

    def __init__(self) -> None:
        self.log_rate = 0.0
        self.weight = 0.0

    def add(self, log_rate: float, count: float) -> None:
        surprise = log_rate - self.log_rate
        if self.weight >= _SETTLED:
            surprise = max(-_STEP, min(_STEP, surprise))
        self.weight += count
        self.log_rate += surprise * count / self.weight
        self.weight = min(self.weight, _MAX_WEIGHT)

    def with_prior(self, log_rate: float) -> float:
        total = self.log_rate * self.weight + log_rate * _PRIOR_WEIGHT
        return total / (self.weight + _PRIOR_WEIGHT)


class LearnedLinks:
    """Paths between workers on machines that are not described."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], _Mean] = {}
        self._hosts: dict[tuple[str, str], _Mean] = {}
        self._kinds: dict[bool, _Mean] = {True: _Mean(), False: _Mean()}
        self._usual_paths: dict[bool, Path] = {}

    def observe(self, source: End, target: End, nbytes_per_s: float, count: int = 1) -> bool:
        """Add a report.

        Parameters
        ----------
        source, target
            The sender and the receiver.
        nbytes_per_s
            Mean rate of `count` transfers.

        Returns
        -------
        bool
            Whether the report is plausible. Other reports are ignored.
        """
        try:
            if not (_SLOWEST <= nbytes_per_s <= _FASTEST and count >= 1) or source == target:
                return False
        except TypeError:
            return False
        log_rate, weight = math.log(nbytes_per_s), min(float(count), _MAX_WEIGHT)
        hosts = source.host, target.host
        _entry(self._pairs, (source.address, target.address)).add(log_rate, weight)
        _entry(self._hosts, hosts).add(log_rate, weight)
        self._kinds[source.host == target.host].add(log_rate, weight)
        self._usual_paths.clear()
        return True

    def path(self, source: End, target: End) -> Path:
        """Return the path between two workers, from reports or priors."""
        if source.address == target.address:
            return LOCAL
        is_near = source.host == target.host
        of_hosts = self._hosts.get((source.host, target.host))
        if of_hosts is None:
            return self._usual(is_near)
        log_rate = of_hosts.with_prior(self._log_rate(is_near))
        of_pair = self._pairs.get((source.address, target.address))
        if of_pair is not None:
            log_rate = of_pair.with_prior(log_rate)
        return Path(LATENCY_S, math.exp(log_rate), _KINDS[is_near])

    def _usual(self, is_near: bool) -> Path:
        """Return the path for a pair of hosts without reports. Most pairs are of this kind."""
        found = self._usual_paths.get(is_near)
        if found is None:
            rate = math.exp(self._log_rate(is_near))
            found = self._usual_paths[is_near] = Path(LATENCY_S, rate, _KINDS[is_near])
        return found

    def _log_rate(self, is_near: bool) -> float:
        prior = SAME_HOST_NBYTES_PER_S if is_near else OTHER_HOST_NBYTES_PER_S
        return self._kinds[is_near].with_prior(math.log(prior))

    def uncertainty(self) -> float:
        """Return the factor by which rates may be wrong, up or down: two standard deviations.

        The factor is very large before any report, because the priors are of an arbitrary network.
        """
        weight = max(mean.weight for mean in self._kinds.values())
        return math.exp(2 * _SCATTER / math.sqrt(weight)) if weight else _NO_IDEA

    def forget(self, address: str) -> None:
        """Forget the pairs of a worker that left. Its host may have others."""
        for pair in [pair for pair in self._pairs if address in pair]:
            del self._pairs[pair]


class LearnedShares:
    """The shares of described bandwidths that transfers reach, by the kind of path."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Mean] = {}

    def observe(self, described: Path, nbytes_per_s: float, count: int) -> None:
        """Add a plausible report on a described path, as for `LearnedLinks.observe`."""
        share = nbytes_per_s / described.bandwidth_nbytes_per_s
        weight = min(float(count), _MAX_WEIGHT)
        self._kinds.setdefault(described.kind, _Mean()).add(math.log(share), weight)

    def of(self, described: Path) -> Path:
        """Return a described path with the bandwidth that transfers are expected to reach."""
        mean = self._kinds.get(described.kind)
        share = min(1.0, math.exp(mean.with_prior(0.0))) if mean is not None else 1.0
        return replace(
            described,
            latency_s=max(described.latency_s, LATENCY_S),
            bandwidth_nbytes_per_s=share * described.bandwidth_nbytes_per_s,
        )


def _entry(means: dict[tuple[str, str], _Mean], key: tuple[str, str]) -> _Mean:
    found = means.get(key)
    if found is None:
        while len(means) >= MAX_PAIRS:
            del means[next(iter(means))]
        found = means[key] = _Mean()
    return found
