"""Recording of traces on a running cluster: workers, the scheduler, and the client that asks.

`tracing` has the format of files, the arithmetic of clocks and the merge; it is pure.
"""
