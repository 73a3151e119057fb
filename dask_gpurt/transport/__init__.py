"""Transport of bytes between workers: wire format, send queues, shared memory and UCX."""
