"""Models of machines, workloads and time, for simulations of a cluster.

Nothing here knows distributed. `dask_gpurt.plugins.simulation.simulated_run` runs distributed's own
scheduler and worker state machines on these models, in virtual time.
"""
