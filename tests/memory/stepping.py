"""Lanes that run only when a test steps them, and tiers that fail on demand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dask_gpurt.devices.ordering import HazardError


@dataclass
class ListLane:
    """A lane whose calls wait until the test makes them."""

    calls: list = field(default_factory=list)

    def __call__(self, call, path="", nbytes=0):
        self.calls.append(call)

    def step(self, number=0):
        self.calls.pop(number)()


class SteppedLanes:
    """The four lanes of a store, stepped in a fixed order: the owner's calls run first."""

    def __init__(self):
        self.write, self.read, self.owner, self.later = (ListLane() for _ in range(4))

    @property
    def lanes(self):
        lanes = (self.owner, self.write, self.read, self.later)
        return [lane for lane in lanes if lane.calls]

    def settle(self):
        while lanes := self.lanes:
            lanes[0].step()


class FailingTier:
    """A tier whose n-th `put` or `get` from now on fails."""

    def __init__(self, tier):
        self._tier = tier
        self._left = {}
        self._errors = {}

    def fail(self, operation, error, n=0):
        self._left[operation] = n
        self._errors[operation] = error

    def mend(self):
        self._left.clear()

    def _count(self, operation):
        if operation in self._left:
            self._left[operation] -= 1
            if self._left[operation] < 0:
                del self._left[operation]
                # The error is not kept, because its traceback holds the value.
                raise self._errors.pop(operation)

    def put(self, flat):
        self._count("put")
        return self._tier.put(flat)

    def get(self, place):
        self._count("get")
        return self._tier.get(place)

    def __getattr__(self, name):
        return getattr(self._tier, name)


def watched(packing, hazards):
    """Return a packing that records ordering errors of a device, which the store survives."""

    def watch(function):
        def call(*args):
            try:
                return function(*args)
            except HazardError as error:
                hazards.append(error)
                raise

        return call

    return replace(packing, flatten=watch(packing.flatten), restore=watch(packing.restore))
