"""Occupancy of a GPU: how many blocks of a kernel fit a multiprocessor, and how to limit them."""
