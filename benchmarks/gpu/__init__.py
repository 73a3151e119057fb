"""Benchmark of the devices room on a real GPU: `python -m benchmarks.gpu`."""
