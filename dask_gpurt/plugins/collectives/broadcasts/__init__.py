"""Copies of a value on many workers.

- `broadcast_run`: one broadcast on one worker.
- `worker_broadcasts`: the handlers of a worker, and the values that it sends and gets.
- `broadcaster`: the scheduler's side: who sends to whom, and what to do when a worker fails.
- `wide_values` and `awaited_values`: values that tasks on several workers need, on the scheduler
  and on workers.

`plugins.patches.values.replicate` has the scheduler's functions that this replaces.
"""
