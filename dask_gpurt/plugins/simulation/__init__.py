"""Simulations in which distributed's own scheduler and worker state machines run in virtual
time.
"""
