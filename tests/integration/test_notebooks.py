"""Notebooks use the runtime through clients of both kinds, and show its status and progress."""

from __future__ import annotations

import json
import os
import re

import pytest
from dask.utils import format_bytes

from tests.limits import HANG_S

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="runs the notebooks")

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SHUFFLE = """
import dask, pandas as pd, dask.dataframe as dd
frame = dd.from_pandas(pd.DataFrame({"key": range(1_000), "x": 1}), npartitions=4)
with dask.config.set({"dataframe.shuffle.method": "p2p"}):
    rows = frame.shuffle("key").map_partitions(len).sum()
"""

#: A kernel has a running loop, so cells may await.
ASYNCHRONOUS = [
    """
from distributed import Client, LocalCluster
import dask_gpurt
cluster = await LocalCluster(
    n_workers=2, threads_per_worker=1, processes=False, protocol="tcp", asynchronous=True,
    dashboard_address=":0",
)
client = await Client(cluster, asynchronous=True)
await dask_gpurt.enable(client)
""",
    SHUFFLE,
    "assert await client.compute(rows) == 1_000",
    "await dask_gpurt.status(client)",
    """
future = client.submit(sum, [1, 2], key="one")
assert await future == 3
assert (await dask_gpurt.explain(client, "one"))["known"]
await dask_gpurt.disable(client)
await dask_gpurt.status(client)
""",
    """
await client.close()
await cluster.close()
""",
]

#: With the flag alone, and the client as most notebooks have it.
SYNCHRONOUS = [
    """
import dask
dask.config.set({"gpurt.enabled": True})
from distributed import Client
client = Client(n_workers=2, threads_per_worker=1, dashboard_address=":0")
import dask_gpurt
""",
    SHUFFLE,
    "assert rows.compute() == 1_000",
    "dask_gpurt.status(client)",
    """
dask_gpurt.disable(client)
dask_gpurt.status(client)
""",
    "client.shutdown()",
]


def executed(cells, folder, watch=lambda html: None, failing=()):
    """Return a notebook after its cells ran in a kernel.

    Parameters
    ----------
    watch
        Called with the HTML whenever a cell replaces an output.
    failing
        Cells that must fail.
    """

    class Watched(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            if msg["msg_type"] == "update_display_data":
                watch(msg["content"]["data"]["text/html"])
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    for cell in notebook.cells:
        if cell.source in failing:
            cell.metadata["tags"] = ["raises-exception"]
    resources = {"metadata": {"path": str(folder)}}
    Watched(notebook, timeout=HANG_S, kernel_name="python3", resources=resources).execute()
    nbformat.validate(notebook)
    return notebook


def problems(notebook):
    """Return what cells printed of warnings and errors."""
    said = [
        one["text"]
        for cell in notebook.cells
        for one in cell.outputs
        if one.output_type == "stream" and "initialized by task" not in one["text"]
    ]
    return [text for text in said if "ERROR" in text or "Traceback" in text]


@pytest.mark.parametrize("cells", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_a_notebook_runs_and_shows_the_status(cells, tmp_path):
    notebook = executed(cells, tmp_path)
    shown = [
        one["data"]["text/html"]
        for cell in notebook.cells
        for one in cell.outputs
        if one.output_type == "execute_result"
    ]
    assert len(shown) == 2
    assert "dask_gpurt is on. Workers: 2. Shuffles: 1 on dask_gpurt, 0 on stock Dask." in shown[0]
    assert "pandas.DataFrame" in shown[0]
    assert "disabled by a client" in shown[1]
    assert problems(notebook) == []


#: A shuffle whose last input partition comes when somebody has opened the pipe `SEEN` to write.
HELD = """
def part(number):
    if number == 3:
        open(SEEN).close()
    return pd.DataFrame({"key": range(number, number + 4_000), "x": 0.5})
parts = dd.from_map(part, range(4), meta=pd.DataFrame({"key": [0], "x": [0.5]}))
with dask.config.set({"dataframe.shuffle.method": "p2p"}):
    held = parts.shuffle("key", npartitions=4).map_partitions(len).sum()
"""
TOTALS = "import json; print(json.dumps(STATUS['totals']))"
#: What each kind of client needs to set up, to watch, to fail, to get the totals and to end.
WATCHED = {
    "asynchronous": (
        ASYNCHRONOUS[0],
        "async with dask_gpurt.progress(client):\n    assert await client.compute(held) == 16_000",
        "async with dask_gpurt.progress(client):\n    await client.submit(divmod, 1, 0)",
        TOTALS.replace("STATUS", "(await dask_gpurt.status(client))"),
        ASYNCHRONOUS[-1],
        "await client.compute(rows)",
    ),
    "synchronous": (
        SYNCHRONOUS[0],
        "with dask_gpurt.progress(client):\n    assert held.compute() == 16_000",
        "with dask_gpurt.progress(client):\n    client.submit(divmod, 1, 0).result()",
        TOTALS.replace("STATUS", "dask_gpurt.status(client)"),
        SYNCHRONOUS[-1],
        "rows.compute()",
    ),
}


@pytest.mark.parametrize("kind", WATCHED)
def test_a_notebook_shows_what_moves(kind, tmp_path):
    os.mkfifo(seen := tmp_path / "seen")
    begin, watched, failing, totals, end, before = WATCHED[kind]
    # The last input takes a thread for itself; the others are sent by the worker's other thread.
    begin = begin.replace("threads_per_worker=1", "threads_per_worker=2")
    cells = [begin, SHUFFLE, before, totals, f"SEEN = {str(seen)!r}", HELD]
    cells += [watched, totals, failing, end]
    updates = []
    opened = []

    def watch(html):
        updates.append(html)
        # Three of four inputs are sent, none of four outputs is assembled.
        if "cut and send" in html and ">37%<" in html and not opened:
            opened.append(seen.open("w"))

    notebook = executed(cells, tmp_path, watch, [failing])
    opened[0].close()
    # Where Dask logs to the kernel's own stderr, cells also have outputs with its lines.
    outputs = {
        cell.source: [one for one in cell.outputs if one.output_type != "stream"]
        for cell in notebook.cells
    }
    first, last = (
        json.loads(one["text"])
        for cell in notebook.cells
        for one in cell.outputs
        if cell.source == totals and one.get("name") == "stdout"
    )
    moved = last["sent_nbytes"] - first["sent_nbytes"]
    assert 0 < moved < last["sent_nbytes"]
    (shown,) = outputs[watched]
    assert f">{format_bytes(moved)}<" in shown["data"]["text/html"]
    assert "1 with dask_gpurt, 0 with stock Dask" in shown["data"]["text/html"]
    assert f"moved between workers  {format_bytes(moved)}" in shown["data"]["text/plain"]
    # While the shuffle ran, the workers held its shards.
    assert any("shards of shuffles" in html for html in updates)
    # A block that fails ends as without progress, and its output says how.
    shown, error = outputs[failing]
    assert error["ename"] == "ZeroDivisionError"
    assert "the block ended with ZeroDivisionError" in shown["data"]["text/html"]
    assert not re.search(r"\d+/\d+ tasks", shown["data"]["text/html"])
