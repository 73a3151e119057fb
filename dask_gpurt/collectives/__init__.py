"""Collective operations: who sends which part of a value to whom, in which order, and why so.

*Ranks* are the members of a group, numbered from 0. Every rank has a value of the same shape and
type. Operations combine these values, or copy one of them to all ranks. An algorithm cuts values
into slices, and is a list of steps for each rank.

- `steps`: what a step is.
- `schedules`: algorithms that treat all ranks alike. `two_level` knows which ranks share a host.
- `choice`: the cost of each algorithm on given links, and the cheapest one.
- `reduction`: adding up slices in memory.
- `sliced_trees`: which levels of a reduction of Dask's combine slices. `slicing` cuts and combines.

The room is pure but for that memory. `plugins` run the steps on workers.
"""
