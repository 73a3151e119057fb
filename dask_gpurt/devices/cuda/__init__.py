"""A GPU as a device: CUDA streams, events and memory, through CuPy and RMM."""
