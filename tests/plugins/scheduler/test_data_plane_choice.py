"""The choice of the data plane of a run, and what is counted about it."""

from __future__ import annotations

from types import SimpleNamespace

from dask_gpurt.config import read
from dask_gpurt.plugins.scheduler.data_plane_choice import MAX_REASONS, DataPlaneChoice


class NeverReady(DataPlaneChoice):
    """A choice for a cluster in which one worker after the other is not ready."""

    n_asked = 0

    def _obstacle(self, stock):
        self.n_asked += 1
        return "shuffle", f"worker {self.n_asked} is not ready"


def test_the_last_reasons_for_stock_dask_are_kept():
    """Reasons name workers, and a scheduler sees ever new ones."""
    choice = NeverReady(None, SimpleNamespace(is_open=True))
    stock = object()
    for _ in range(MAX_REASONS + 50):
        assert choice.choose(stock, read(), keeps_shards=False) is stock
    report = choice.report()
    assert report["runs"] == {"gpurt": 0, "stock": MAX_REASONS + 50}
    reasons = [one["why"] for one in report["fallbacks"]]
    assert len(reasons) == MAX_REASONS
    assert reasons[-1] == f"worker {choice.n_asked} is not ready"
