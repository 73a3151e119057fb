"""Conversion of task outputs to plain nodes and buffers, and back."""
