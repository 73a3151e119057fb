"""Peer-to-peer exchange: owners of the output partitions, and storage of their shards."""
