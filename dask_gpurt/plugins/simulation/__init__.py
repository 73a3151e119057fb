"""Simulated clusters: distributed's own scheduler, on virtual time and modelled workers."""
