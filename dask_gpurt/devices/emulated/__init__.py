"""An emulated device in host memory, for machines without a GPU."""
