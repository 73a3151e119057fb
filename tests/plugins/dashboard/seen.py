"""Inputs of the page's data, as workers and the scheduler report them."""

from __future__ import annotations

from dask_gpurt.shuffle.figures import PHASES
from dask_gpurt.shuffle.tally import Tally


def status(**changes):
    return {
        "active": True,
        "activation": "one",
        "not_ready": {},
        "tasks": (0, 0),
        "progress": {},
        "reason": None,
        "runs": {"gpurt": 1, "stock": 0},
        "fallbacks": [],
        "totals": {},
        "placement": None,
        "shuffles": [],
        **changes,
    }


def worker(name, **changes):
    return {
        "address": f"tcp://{name}",
        "name": name,
        "process_nbytes": 1_000,
        "managed_nbytes": 300,
        "spilled_nbytes": 50,
        "limit_nbytes": 2_000,
        **changes,
    }


def glance(**changes):
    return {
        "links": [],
        "levels": [],
        "spilled_nbytes": 0,
        "unmanaged": None,
        "shards_nbytes": 0,
        "shards_on_disk_nbytes": 0,
        "open_runs": [],
        "ended_runs": [],
        "codecs": {"choices": {}, "largest": []},
        **changes,
    }


def shuffles(runs, open_runs=None):
    """Return the summaries of runs, from the snapshots of each worker."""
    tally = Tally()
    for worker in {**runs, **(open_runs or {})}:
        tally.begin(worker, worker)
        tally.take_runs(worker, runs.get(worker, []), (open_runs or {}).get(worker, []))
    return tally.shuffles()


def run(shuffle_id, run_id=1, **changes):
    return {
        "id": shuffle_id,
        "run": run_id,
        "kind": "pandas.DataFrame",
        "began_s": float(run_id),
        "rows_in": 10,
        "local_nbytes": 100,
        "sent_nbytes": 300,
        "raw_nbytes": 200,
        "wire_nbytes": 50,
        "messages": 2,
        "rows_owned": 10,
        "n_owned": 2,
        "seconds": dict.fromkeys(PHASES, 0.5),
        "links": {},
        "fullest": [("0", 6)],
        **changes,
    }


def link(sender, receiver, path, nbytes, messages=1):
    return [f"tcp://{sender}", f"tcp://{receiver}", path, nbytes, messages]
