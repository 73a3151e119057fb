"""Notebooks use the runtime through clients of both kinds, and show its status as tables."""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="runs the notebooks")

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIMEOUT_S = 120
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


@pytest.mark.parametrize("cells", [ASYNCHRONOUS, SYNCHRONOUS], ids=["asynchronous", "synchronous"])
def test_a_notebook_runs_and_shows_the_status(cells, tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources
    ).execute()
    nbformat.validate(notebook)
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
    # No cell warns or logs an error.
    said = [
        one["text"]
        for cell in notebook.cells
        for one in cell.outputs
        if one.output_type == "stream" and "initialized by task" not in one["text"]
    ]
    assert [text for text in said if "ERROR" in text or "Traceback" in text] == []
