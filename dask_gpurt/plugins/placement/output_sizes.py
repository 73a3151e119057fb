"""How large a result will be, by what others of its kind were. Asked for every decision.

Dask's own figure for a group of tasks is the mean. Groups are often of two kinds, a few whole
blocks and many thin edges of the same array, and a mean of those is the size of none of them: it
has blocks moved for the sake of edges. Here it is the mean of logarithms, of inputs as they are
used: what is used by many counts for many.
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

#: Groups that are remembered.
MAX_GROUPS = 2_000
#: Inputs that are looked at where nothing of a kind has ended.
MAX_GUESSED = 4


class ExpectedSizes:
    """One a scheduler."""

    def __init__(self) -> None:
        #: By group: how many sizes, and the sum of their logarithms.
        self._seen: OrderedDict[str, list[float]] = OrderedDict()

    def observe(self, inputs: Iterable[TaskState]) -> list[int]:
        """Take in the sizes of results that are about to be used, and return them."""
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
        """Bytes: as they are, or as others of the kind were, or as its smallest input has.

        0 if nothing is known.
        """
        if ts.nbytes >= 0:
            return ts.nbytes
        seen = self._seen.get(ts.group.name)
        if seen is not None:
            # Whole bytes, so that sums of sizes do not depend on their order.
            return int(exp(seen[1] / seen[0]))
        # Asked for the prefix first: mostly there is a figure of the group, or none at all.
        for kin in (ts.group, ts.prefix) if ts.prefix.nbytes_total > 0 else ():
            if kin.nbytes_total > 0:
                states = kin.states
                n_done = states["memory"] + states["released"] + states["forgotten"]
                if n_done:
                    return kin.nbytes_total // n_done
        # Nothing of the kind has ended. A guess on the low side, that tips the scales between
        # workers that are as good otherwise.
        inputs = ts.dependencies
        if len(inputs) == 1:
            # Most often so, and in a third of the time.
            (dts,) = inputs
            least = dts.nbytes
        else:
            least = maxsize if inputs else 0
            for dts in islice(inputs, MAX_GUESSED):
                nbytes = dts.nbytes
                if nbytes < least:
                    least = nbytes
        return least if least > 0 else 0
