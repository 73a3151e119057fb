"""Formats of trace files: how a trace is drawn, and how Chrome's and Perfetto's formats hold it."""
