"""Compression of shuffle bytes, and the rule that says when it pays."""
