"""Bytes between workers: the wire format and the queues in front of it."""
