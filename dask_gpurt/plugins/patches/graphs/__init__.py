"""Graphs of programs: where the scheduler makes tasks of them, and the layers of reductions."""
