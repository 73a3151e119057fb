"""The private names of dask and distributed that this package uses or replaces, nothing else."""
