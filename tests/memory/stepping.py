"""Lanes that a test steps through, and tiers that fail on demand."""

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
                # Not kept here: its traceback holds the value.
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
