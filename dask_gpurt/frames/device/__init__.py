"""Tables and arrays in the memory of a device: cuDF and CuPy."""
