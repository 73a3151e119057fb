"""What a cluster would do: machines, workloads and time, modelled.

Nothing here knows distributed. `dask_gpurt.plugins.simulation.simulated_run` lets distributed's own
scheduler and worker state machines work on these models, in virtual time.
"""
