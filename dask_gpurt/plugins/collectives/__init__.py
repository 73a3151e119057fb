"""Collective operations on workers: steps of `dask_gpurt.collectives`, over the links of shuffles.

- `broadcast_run`: one broadcast on one worker.
- `worker_broadcasts`: the handlers of a worker, and the values that it sends and gets.
- `broadcaster`: the scheduler's side: who sends to whom, and what to do when a worker fails.
- `wide_values` and `awaited_values`: values that tasks on several workers need, on the scheduler
  and on workers.

Functions that run on several workers at once, and exchange arrays:

- `communicator`: the client's side. It runs a function on each worker.
- `gangs`: the scheduler's side: who may run when, and the failure that ends a group.
- `worker_groups`: the handlers of a worker. `group_member` is one rank there, `operation_run` one
  operation of it with the `task_thread`, and `group_messages` what ranks send each other.
- `rank`: what the function sees. `torch_start` starts torch or NCCL among ranks.

`plugins.patches.values.replicate` has the scheduler's functions that this replaces.
"""
