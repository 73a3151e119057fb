"""The decisions of the store: who may run, what to evict, what to prefetch. No I/O here."""
