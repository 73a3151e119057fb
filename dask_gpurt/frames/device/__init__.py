"""Tables and arrays in device memory: cuDF and CuPy."""
