"""Scheduler, worker and client plugins, and the patches they need. Only this package imports
distributed's internals.
"""
