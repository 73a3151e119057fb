"""Traces of a whole cluster: typed events, one clock for all, files, and reports.

This room is pure: it knows no Dask and no running cluster. `plugins.tracing` records events on
workers and on the scheduler, and `command` prints reports.
"""
