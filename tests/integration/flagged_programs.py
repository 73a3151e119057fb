"""Helpers for tests of the flag: a small shuffle, the flag's setting, and a wait for workers."""

from __future__ import annotations

import dask
import pandas as pd

from tests.integration.comparing import collection


def shuffled():
    frames = [pd.DataFrame({"a": range(i, 100 + i), "b": 1.5}) for i in range(4)]
    return collection(frames).shuffle("a", npartitions=3)


def flagged():
    return dask.config.set({"gpurt.enabled": True})


async def until_workers(client, condition):
    """Poll the scheduler, without sleeping, until its workers fulfil a condition."""
    while not condition((await client.scheduler.identity(n_workers=-1))["workers"]):
        pass
