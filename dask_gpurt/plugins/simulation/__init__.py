"""Simulations of distributed's own scheduler and worker state machines in virtual time."""
