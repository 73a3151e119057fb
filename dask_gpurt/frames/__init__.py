"""Adapters for kinds of data: partition, pack, unpack and concatenate."""
