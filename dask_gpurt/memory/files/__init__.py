"""Values on disk: the file format, the disk tier, and cleaning up after dead processes."""
