"""Queues of shards that wait to be sent, and their budget."""
