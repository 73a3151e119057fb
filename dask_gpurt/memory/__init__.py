"""Storage of task outputs across tiers of memory: `worker.data` and the decisions behind it."""
