"""Rules that find what limited a traced program, and the change that helps.

Each takes the tables of a report (`Findings`), and returns a `Bottleneck` or None.
"""
