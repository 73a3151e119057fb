"""All private names of dask and distributed that this package uses or replaces, and nothing else.

Each module begins with a table of the names it touches; `docs/patches.md` collects the tables.
"""
