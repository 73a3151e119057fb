"""Models of clusters, workloads and time, for simulations.

Nothing here knows distributed. `dask_gpurt.plugins.simulation.simulated_run` runs distributed's own
scheduler and worker state machines on these models, in virtual time.
"""
