"""The report of a trace: where the time went, and the changes that help.

A `Trace` goes in; values, text and an HTML page come out. This room reads no file and prints
nothing: `tracing.files` reads traces, and `command.traces` prints reports.
"""
