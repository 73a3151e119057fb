"""Collective operations on a cluster: steps of `dask_gpurt.collectives`, over links of shuffles.

- `broadcasts`: copies of a value on many workers.
- `groups`: functions that run on several workers at once, and exchange arrays.
- `reductions`: the scheduler's look at graphs: which reductions combine slices.
- `shipped`: functions of tasks, for workers with and without this package.
- `cluster_collectives`: the scheduler's side of all of them.

`plugins.patches` has the functions of Dask that these replace.
"""
