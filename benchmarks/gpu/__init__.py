"""What a GPU does with the runtime's devices room, in one command: `python -m benchmarks.gpu`."""
