"""Decisions of the store: which task may run, what to evict, what to prefetch. No I/O here."""
