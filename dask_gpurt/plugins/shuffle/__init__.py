"""Shuffles and rechunks on a worker: distributed's control plane, this package's data plane."""
