"""The machines of a live cluster: what workers report, and what a probe measures."""
