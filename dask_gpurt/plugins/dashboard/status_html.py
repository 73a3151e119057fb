"""What `dask_gpurt.status` returns: a dict that notebooks show as tables. Pure."""

from __future__ import annotations

from typing import Any

from dask.utils import format_bytes

from dask_gpurt import metrics
from dask_gpurt.plugins.dashboard import tables
from dask_gpurt.plugins.dashboard.overview import MAX_SHUFFLES, labelled


class RuntimeStatus(dict[str, Any]):
    """A status, with tables of it for notebooks."""

    def _repr_html_(self) -> str:
        names = {"active", "reason", "runs", "fallbacks", "placement", "workers", "totals"}
        if not names <= self.keys():
            # The caller has changed it.
            return tables.quiet(repr(dict(self)))
        if not self["active"]:
            return tables.titled("dask_gpurt is off", tables.quiet(str(self["reason"])))
        seen = {
            **self,
            "shuffles": labelled(self["shuffles"][-MAX_SHUFFLES:]),
            "workers": [{"address": worker, "name": worker} for worker in self["workers"]],
        }
        n_workers, runs = len(self["workers"]), self["runs"]
        summary = (
            f"dask_gpurt is on. Workers: {n_workers}. Shuffles: {runs['gpurt']} on dask_gpurt, "
            f"{runs['stock']} on stock Dask."
        )
        return (
            tables.titled(summary, self._problems())
            + tables.titled("Shuffles", tables.shuffles(seen))
            + tables.titled("Placement", tables.placement(seen))
            + tables.titled("Totals", self._totals())
        )

    def _problems(self) -> str:
        problems = [*self.get("not_ready", {}).values()]
        problems += [f"no answer from worker {worker}" for worker in self.get("silent", ())]
        return "".join(map(tables.quiet, problems))

    def _totals(self) -> str:
        rows = [
            (
                meaning,
                tables.Number(
                    format_bytes(self["totals"][name])
                    if name.endswith("_nbytes")
                    else f"{self['totals'][name]:,}"
                ),
            )
            for name, meaning in metrics.MEANING.items()
            if self["totals"].get(name)
        ]
        return tables.table(("", ""), rows) if rows else tables.quiet("Nothing was counted yet.")
