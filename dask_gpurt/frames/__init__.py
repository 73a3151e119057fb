"""One module a kind of data: partition, pack, unpack and concatenate it."""
