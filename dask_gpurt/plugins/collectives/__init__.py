"""Collective operations on workers: steps of `dask_gpurt.collectives`, over the links of shuffles.

- `broadcast_run`: one broadcast on one worker.
- `worker_broadcasts`: the handlers of a worker, and the values that it sends and gets.
- `broadcaster`: the scheduler's side: who sends to whom, and what to do when a worker fails.
- `reductions`: the scheduler's look at graphs: which reductions combine slices.
- `shipped`: functions of tasks, for workers with and without this package.

`plugins.patches.values.replicate` has the scheduler's functions that this replaces.
"""
