"""Managed memory on a worker: the store replaces `worker.data` and follows task states."""
