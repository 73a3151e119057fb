"""Expected size of a result, from the sizes of similar results. Asked for every decision.

Dask's own figure for a group of tasks is the mean. Groups often have two kinds of results: a few
whole blocks and many thin edges of the same array. Their mean is the size of neither, and with it
blocks are moved for the sake of edges. Here the figure is the mean of logarithms over inputs as
they are used: a result that many tasks use counts many times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from math import exp, log
from sys import maxsize
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed.scheduler import TaskState

#: Limit of groups whose sizes are kept.
MAX_GROUPS = 2_000
#: Limit of inputs that are read where no task of a kind has ended.
MAX_GUESSED = 4


class ExpectedSizes:
    """The sizes of results on one scheduler."""

    def __init__(self) -> None:
        #: By group: count of sizes and sum of their logarithms.
        self._seen: OrderedDict[str, list[float]] = OrderedDict()

    def observe(self, inputs: Iterable[TaskState]) -> list[int]:
        """Record the sizes of results that are about to be used, and return them."""
        known = self._seen
        sizes = []
        for ts in inputs:
            nbytes = ts.nbytes
            if nbytes < 0:
                nbytes = ts.get_nbytes()
            sizes.append(nbytes)
            name = ts.group.name
            seen = known.get(name)
            if seen is None:
                seen = known[name] = [0, 0.0]
                if len(known) > MAX_GROUPS:
                    known.popitem(last=False)
            seen[0] += 1
            seen[1] += log(nbytes + 1)
        return sizes

    def __call__(self, ts: TaskState) -> int:
        """Return the known size of a result, or the expected one in bytes; 0 if nothing is known.

        The expected size is that of similar results, or of the smallest input if there are none.
        """
        if ts.nbytes >= 0:
            return ts.nbytes
        seen = self._seen.get(ts.group.name)
        if seen is not None:
            # Whole bytes, so that sums of sizes do not depend on their order.
            return int(exp(seen[1] / seen[0]))
        # Ask the prefix first: mostly there is a figure for the group, or none at all.
        for kin in (ts.group, ts.prefix) if ts.prefix.nbytes_total > 0 else ():
            if kin.nbytes_total > 0:
                states = kin.states
                n_done = states["memory"] + states["released"] + states["forgotten"]
                if n_done:
                    return kin.nbytes_total // n_done
        # No similar task has ended. Guess low: the guess only decides between workers that are
        # otherwise equally good.
        inputs = ts.dependencies
        if len(inputs) == 1:
            # The most common case, in a third of the time.
            (dts,) = inputs
            least = dts.nbytes
        else:
            least = maxsize if inputs else 0
            for dts in islice(inputs, MAX_GUESSED):
                nbytes = dts.nbytes
                if nbytes < least:
                    least = nbytes
        return least if least > 0 else 0
