"""Helpers that show the pages of a pool, and use a pool at random."""

from __future__ import annotations

import random

import numpy as np

from dask_gpurt.devices.host_memory.pages import PAGE_NBYTES

PATIENCE_S = 20.0
HALF = PAGE_NBYTES // 2
MANY = 64 * PAGE_NBYTES


def address_of(buffer):
    return buffer.__array_interface__["data"][0]


def pages_of(pool):
    """Return the numbers of used and idle pages."""
    return pool.used_nbytes / PAGE_NBYTES, pool.idle_nbytes / PAGE_NBYTES


class Walk:
    """Random use of a pool. Every live buffer is filled with its own number."""

    def __init__(self, pool, seed, lanes):
        self.pool = pool
        self.random = random.Random(seed)
        self.lanes = lanes
        self.live = {}
        self.n_made = 0

    def step(self, largest_nbytes=3 * PAGE_NBYTES, most=12):
        if len(self.live) < most and self.random.random() < 0.6:
            nbytes = int(2 ** self.random.uniform(14, np.log2(largest_nbytes)))
            buffer = self.pool.empty(nbytes, self.random.choice(self.lanes))
            self.n_made += 1
            buffer[:] = self.n_made % 251
            self.live[self.n_made] = buffer
        elif self.live and self.random.random() < 0.9:
            self.drop(self.random.choice(list(self.live)))
        else:
            self.pool.close_lane(self.random.choice(self.lanes))

    def drop(self, number):
        buffer = self.live.pop(number)
        expected = number % 251
        assert buffer[0] == buffer[-1] == expected
        assert (buffer == expected).all(), "somebody else wrote into it"

    def drop_all(self):
        for number in list(self.live):
            self.drop(number)
        for lane in self.lanes:
            self.pool.close_lane(lane)
