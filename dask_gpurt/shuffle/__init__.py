"""Peer-to-peer exchange: who owns what, and the shards on their way there."""
