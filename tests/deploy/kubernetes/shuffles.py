"""A shuffle whose answer is known, and the links that it made."""

from __future__ import annotations

from typing import Any

from distributed import Client

import dask_gpurt
from tests.failure.stage import N_INPUTS, N_OUTPUTS, expected, frame
from tests.integration.comparing import assert_same_partitions, collection, partitions, runs


def shuffle(client: Client) -> None:
    """Have our data plane shuffle, and check the answer."""
    before = runs(client)
    lazy = collection([frame(number) for number in range(N_INPUTS)])
    got = partitions(client, lazy.shuffle("key", npartitions=N_OUTPUTS))
    assert_same_partitions(got, expected())
    assert runs(client) == {**before, "gpurt": before["gpurt"] + 1}


def links(client: Client) -> dict[tuple[str, str], Any]:
    """Return the link of each pair of workers that have exchanged shards."""
    workers = dask_gpurt.status(client)["workers"]
    return {(one, other): link for one in workers for other, link in workers[one]["links"].items()}
