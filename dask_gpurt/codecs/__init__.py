"""Compression of shuffle data, and the rule for when it pays."""
