"""Shuffles and rechunks on a worker: distributed's control plane, our runs and transports."""
