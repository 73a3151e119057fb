"""Functions that run on several workers at once, and exchange arrays.

- `communicator`: the client's side. It runs a function on each worker.
- `gangs`: the scheduler's side: who may run when, and the failure that ends a group.
- `worker_groups`: the handlers of a worker. `group_member` is one rank there, `operation_run` one
  operation of it with the `task_thread`, and `group_messages` what ranks send each other.
- `rank`: what the function sees. `torch_start` starts torch or NCCL among ranks.
"""
