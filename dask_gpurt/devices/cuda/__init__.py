"""A GPU as a device: streams, events and memory of CUDA, through CuPy and RMM."""
