"""Task outputs over tiers of memory: the store that is `worker.data`, and what decides for it."""
