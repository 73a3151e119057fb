"""The runtime works on a cluster of this environment. It needs no GPU.

On a GPU machine that has a kit of packages, these tests fail if the kit is incomplete.
"""

from __future__ import annotations

import numpy as np
import pytest

distributed = pytest.importorskip("distributed", reason="Dask is not installed")


@pytest.mark.parametrize("transport", ["auto", "ucx"])
def test_shuffle_of_rows_runs_on_our_data_plane(transport):
    import dask
    import dask.dataframe as dd
    import pandas as pd

    import dask_gpurt

    if transport == "ucx":
        pytest.importorskip("ucxx", reason="the ucx extra is not installed")
    rows = pd.DataFrame({"key": np.arange(1000) % 7, "value": np.arange(1000.0)})
    settings = {"gpurt.shuffle.transport": transport}
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(processes=False, protocol="tcp://", **options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        dask_gpurt.enable(client)
        with client.as_current():
            shuffled = dd.from_pandas(rows, npartitions=4).shuffle("key", shuffle_method="p2p")
            got = client.compute(shuffled).result()
        assert dask_gpurt.status(client)["runs"] == {"gpurt": 1, "stock": 0}
    pd.testing.assert_frame_equal(got.sort_values("value"), rows)
