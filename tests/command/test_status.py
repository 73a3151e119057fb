"""`dask gpurt status` shows the real figures of the shuffles in each column."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from dask.utils import format_bytes
from distributed import Client

import dask_gpurt
from dask_gpurt.command.observe import scheduler_address
from dask_gpurt.command.status import as_text, show
from tests.conftest import stock_client
from tests.integration.comparing import collection

pytestmark = pytest.mark.cluster

N_PARTITIONS = 6
ROWS = 9000
#: Below the table, where partitions are named.
HOT = "the fullest output partitions are"


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of two workers that behave as on two hosts and compress shards."""
    settings = {"gpurt.shuffle.transport": "comm", "gpurt.shuffle.compression": "lz4"}
    with dask.config.set(settings), stock_client(2) as client:
        dask_gpurt.enable(client)
        yield client


def shuffled(client: Client, keys: list[int]) -> tuple[list[int], list[int]]:
    """Shuffle; return the rows of each output partition, and of each worker's outputs."""
    parts = [pd.DataFrame({"key": keys, "x": np.arange(ROWS) * 0.1}) for _ in range(4)]
    with client.as_current(), dask.config.set({"dataframe.shuffle.method": "p2p"}):
        lazy = collection(parts).shuffle("key", npartitions=N_PARTITIONS)
        futures = client.compute(lazy.to_delayed())
        rows = {future.key: len(future.result()) for future in futures}
        outputs = [
            [rows[key] for key in keys if key in rows] for keys in client.has_what().values()
        ]
    return list(rows.values()), [sum(worker) for worker in outputs]


def printed(client: Client, capsys: pytest.CaptureFixture[str]) -> str:
    assert show(scheduler_address(client), None, as_json=False) == 0
    return capsys.readouterr().out


def table(text: str) -> list[dict[str, str]]:
    """Return the cells of the table of shuffles, by their headings."""
    below = text.partition("last shuffles with dask_gpurt")[2].partition("\n\n")[0]
    lines = below.splitlines()[1:]
    head, *rows = (re.split(" {2,}", line.strip()) for line in lines if HOT not in line)
    return [dict(zip(head, row, strict=True)) for row in rows]


def as_cells(one: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a line."""
    sender, receiver, nbytes, seconds = one["busiest_link"]
    ends = f"{sender.removeprefix('tcp://')} > {receiver.removeprefix('tcp://')}"
    return {
        "shuffle": f"{one['id'][:8]}[{one['run']}]",
        "rows": f"{one['rows']:,}",
        "data": format_bytes(one["nbytes"]),
        "sent": format_bytes(one["sent_nbytes"]),
        "on the wire": format_bytes(one["wire_nbytes"]),
        "codec ratio": f"{one['raw_nbytes'] / one['wire_nbytes']:.2f}",
        **{
            phase: f"{one['seconds'][phase]:.2f} s"
            for phase in ("partition", "send", "receive", "unpack")
        },
        "busiest link": f"{ends} {format_bytes(int(nbytes / seconds))}/s",
        "skew": f"{one['skew']:.2f}",
    }


def test_every_column_shows_the_real_figures(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    _, rows_of_worker = shuffled(client, list(range(ROWS)))
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        da.ones((64, 64), chunks=(64, 8)).rechunk((8, 64)).sum().compute()
    text = printed(client, capsys)
    status = dask_gpurt.status(client)
    shuffle, rechunk = status["shuffles"]
    assert table(text) == [as_cells(shuffle), as_cells(rechunk)]
    assert shuffle["rows"] == sum(rows_of_worker) == 4 * ROWS
    assert shuffle["skew"] == pytest.approx(max(rows_of_worker) / np.mean(rows_of_worker))
    for name in ("sent_nbytes", "messages"):
        assert shuffle[name] + rechunk[name] == status["totals"][name] > 0
    for one in (shuffle, rechunk):
        assert one["nbytes"] > one["sent_nbytes"] == one["raw_nbytes"] > one["wire_nbytes"] > 0
        assert all(
            one["seconds"][phase] > 0 for phase in ("partition", "send", "receive", "unpack")
        )
        sender, receiver, nbytes, seconds = one["busiest_link"]
        assert {sender, receiver} == status["workers"].keys()
        # Two workers have two links.
        assert one["sent_nbytes"] / 2 <= nbytes <= one["sent_nbytes"]
        assert 0 < seconds <= one["seconds"]["send"]
    assert HOT not in text


def test_columns_are_not_swapped(client: Client) -> None:
    """All values of the row are set to be different; those of a short run may be equal."""
    shuffled(client, list(range(ROWS)))
    found = {**dask_gpurt.status(client), "scheduler": "here"}
    (run,) = found["shuffles"]
    sizes = ("nbytes", "sent_nbytes", "raw_nbytes", "wire_nbytes")
    run |= {name: 10**6 // (n + 1) for n, name in enumerate(sizes)}
    run["seconds"] = {phase: 1.25 + n for n, phase in enumerate(run["seconds"])}
    run["skew"] = 1.19
    assert table(as_text(found)) == [as_cells(run)]
    assert len(set(as_cells(run).values())) == len(as_cells(run))
    # Within a host nothing goes over the network, and one worker has no link.
    run |= {"raw_nbytes": 0, "wire_nbytes": 0, "busiest_link": None}
    (row,) = table(as_text(found))
    assert (row["on the wire"], row["codec ratio"], row["busiest link"]) == ("0 B", "-", "-")


def test_hot_key_is_named_before_it_doubles_a_workers_share(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, rows_of_worker = shuffled(client, [7] * 2500 + list(range(ROWS - 2500)))
    (run,) = dask_gpurt.status(client)["shuffles"]
    assert 1.2 < run["skew"] < 1.5
    assert run["skew"] == pytest.approx(max(rows_of_worker) / np.mean(rows_of_worker))
    hot = rows.index(max(rows))
    assert run["hot"] == [(str(hot), rows[hot])]
    assert run["mean_rows"] == pytest.approx(4 * ROWS / N_PARTITIONS)
    text = printed(client, capsys)
    line = f"{HOT} {hot} ({rows[hot]:,} rows); the mean is 6,000 rows"
    assert f"  {run['id'][:8]}[{run['run']}]: {line}\n" in text


def codecs(status: dict[str, Any], worker: str) -> list[dict[str, Any]]:
    return list(status["workers"][worker]["codecs"])


def test_compression_decisions_are_shown_with_their_numbers(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    shuffled(client, list(range(ROWS)))
    status = dask_gpurt.status(client)
    said = [(address, one) for address in status["workers"] for one in codecs(status, address)]
    assert {one["section"] for _, one in said} == {"key", "x", "index level 0"}
    for address, one in said:
        assert {address, one["link"]} == set(status["workers"])
        assert 0 < one["nbytes"] <= status["totals"]["sent_nbytes"]
        assert one["reason"]
        assert one["slowdown"] >= 1
        chosen = [c for c in one["candidates"] if c["codec"] == one["choice"]]
        assert len(chosen) == (one["choice"] != "none")
        for candidate in chosen:
            # A named codec in the setting asks for the smallest form that uses it.
            assert candidate["ratio"] == max(c["ratio"] for c in one["candidates"]) > 1
            assert candidate["encode_rate"] > 0
            assert candidate["decode_rate"] > 0
    assert {one["choice"] for _, one in said if one["section"] == "key"} == {"narrow+lz4"}
    assert show(scheduler_address(client), None, as_json=True) == 0
    as_json = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    # Rates that JSON cannot express are null there.
    names = ("link", "section", "nbytes", "choice", "reason")
    assert [[one[n] for n in names] for a in as_json["workers"] for one in codecs(as_json, a)] == [
        [one[n] for n in names] for _, one in said
    ]
