"""Occupancy of a GPU: how many blocks of a kernel a multiprocessor holds, and how to limit them."""
