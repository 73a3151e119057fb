"""Values on disk: the file format, the disk tier, and clean-up after dead processes."""
