"""Helpers that compute a collection with stock Dask and the runtime, and compare partitions."""

from __future__ import annotations

from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
from dask.delayed import delayed

import dask_gpurt


def collection(frames: list[pd.DataFrame]) -> Any:
    """Return a Dask DataFrame with these partitions; its meta has the types of the first."""
    parts = [delayed(lambda frame: frame)(frame) for frame in frames]
    return dd.from_delayed(parts, meta=frames[0].iloc[:0], verify_meta=False)


def partitions(client: Any, lazy: Any) -> list[Any]:
    """Return every partition of a collection, computed by a client with P2P shuffles."""
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        return list(client.gather(client.compute(lazy.to_delayed())))


def runs(client: Any) -> dict[str, int]:
    return dict(dask_gpurt.status(client)["runs"])


def on_our_plane(sides: Any, lazy: Any, n_shuffles: int | None = None) -> list[Any]:
    """Return partitions from the enabled side, after a check that our data plane made them."""
    before = runs(sides.enabled)
    got = partitions(sides.enabled, lazy)
    after = runs(sides.enabled)
    ours = after["gpurt"] - before["gpurt"]
    assert after["stock"] == before["stock"]
    assert ours == n_shuffles if n_shuffles is not None else ours > 0
    return got


def assert_same_partitions(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        compare = pd.testing.assert_series_equal
        if isinstance(other, pd.DataFrame):
            compare = pd.testing.assert_frame_equal
        compare(one, other)


def assert_same_as_stock(sides: Any, lazy: Any, n_shuffles: int | None = None) -> list[Any]:
    """Check that partitions of both sides are equal; return those of the enabled side."""
    expected = partitions(sides.stock, lazy)
    got = on_our_plane(sides, lazy, n_shuffles)
    assert_same_partitions(got, expected)
    return got
